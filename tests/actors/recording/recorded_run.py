"""A scheduler with a fake worker whose run is recorded."""

from __future__ import annotations

from pathlib import Path

from actors.config import CacheConfig, SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.transfer_parts import TransferParts
from actors.core.requests.abilities import Ability
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.recording.engine_events import VERSION, EngineHeader
from actors.recording.read_clock import ReadClock
from actors.recording.recorded_scheduler import RecordedScheduler
from actors.recording.recording_file import RecordingFile
from kv_transfer.config import KVTransferConfig
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.sides.scheduler_side import SchedulerSide
from tests.actors.core.builders import BLOCK_SIZE, Clock
from tests.actors.core.fakes import FakeWorker

NUM_BLOCKS = 12


class RecordedRun:
    """One engine; step() lets it take a step."""

    def __init__(self, directory: Path, max_bytes: int = 1 << 20, header: dict[str, object] | None = None) -> None:
        num_state_blocks = int(str((header or {}).get("num_state_blocks", 0)))
        self.clock = Clock()
        read = ReadClock(self.clock)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, overlap=False)
        cache = CacheConfig(block_size=BLOCK_SIZE)
        parts = TransferParts(
            SchedulerSide(KVTransferConfig(), BLOCK_SIZE),
            PrefixSources(None, PrefixFetches("both-0/3", BLOCK_SIZE, max_fetches=0, clock=read)),
        )
        self.scheduler = RecordedScheduler(
            config, cache, NUM_BLOCKS, 64, transfers=parts, num_state_blocks=num_state_blocks, clock=read
        )
        self.worker = FakeWorker(NUM_BLOCKS, BLOCK_SIZE)
        self.file = RecordingFile(directory, "engine", max_bytes)
        facts: dict[str, object] = {
            "version": VERSION,
            "engine_id": "both-0",
            "incarnation": 3,
            "scheduler": config.model_dump(mode="json"),
            "cache": cache.model_dump(mode="json"),
            "kv_transfer": KVTransferConfig().model_dump(mode="json"),
            "num_blocks": NUM_BLOCKS,
            "max_model_len": 64,
            "vocab_size": 1 << 20,
            "kv_bytes_per_token": 0,
            "abilities": tuple(sorted(Ability)),
            "fetch_name": "both-0/3",
            "max_fetches": 0,
            "hash_key": PUBLIC_KEY.value,
        }
        self.scheduler.record(self.file, EngineHeader(**{**facts, **(header or {})}), read)  # type: ignore[arg-type]  # as above

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler.kv_cache_manager

    def step(self) -> None:
        self.clock.now_s += 0.25
        output = self.scheduler.schedule()
        results = self.worker.execute(output)
        self.clock.now_s += 0.5
        self.scheduler.update_from_output(output, results)

    def run(self, max_steps: int = 200) -> None:
        """Take steps until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")
