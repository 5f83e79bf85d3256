"""Measure what an engine's step pays for embeddings that travel: `python -m benchmarks.staging`.

An image's embeddings go through blocks of the KV cache (docs/decisions/0029): they are put in where they were made,
taken out where they are needed, and the blocks are zeroed at both ends, all by the thread that steps. The links between
are those of KV: benchmarks/kv_transfer.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from kv_transfer.connector.fetches import BytesFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import FinishedReceiving, FinishedSending, KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, Reservation, StagedBytes
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.sides.staged_bytes import StagingSide

_NUM_RUNS: Final = 25
_BLOCK_SIZE: Final = 16
_SHAPE: Final = (2048, 4, 28, 2, _BLOCK_SIZE, 128)
"""The shape of the KV cache of a Qwen2.5-VL-7B in bfloat16: 57 344 bytes a token."""
_HIDDEN_BYTES: Final = 3584 * 2
_TICKET: Final = KVTransferParams("image", 1, TransferRole.CONSUMER, EngineAddress("engine-1", 1, "engine-1"))


class _Links:
    """Reports whatever is asked of it as done, at once."""

    def __init__(self) -> None:
        self.output = KVConnectorOutput()

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Nothing moves."""

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Nothing moves."""

    def take_output(self) -> KVConnectorOutput:
        """Return what was done."""
        output, self.output = self.output, KVConnectorOutput()
        return output

    def shutdown(self) -> None:
        """Nothing is open."""


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    kv_cache = torch.zeros(_SHAPE, dtype=torch.bfloat16)
    slot_bytes = kv_cache[0, :, :, :, 0].nbytes
    print(f"CPU time of the step's thread, ms, median of {_NUM_RUNS} (least to most); {slot_bytes} bytes of KV a token")
    print(f"{'image tokens':>14} {'MiB':>6} {'blocks':>7} {'put in':>22} {'zeroed':>22} {'taken out and zeroed':>22}")
    for num_tokens in (256, 1024, 4096):
        data = bytes(num_tokens * _HIDDEN_BYTES)
        num_slots = -(-len(data) // slot_bytes)
        blocks = tuple(range(-(-num_slots // _BLOCK_SIZE)))
        times = [_measure(kv_cache, data, blocks, num_slots) for _ in range(_NUM_RUNS + 1)][1:]
        cells = " ".join(f"{_shown([run[part] for run in times]):>22}" for part in range(3))
        print(f"{num_tokens:>14} {len(data) / 2**20:>6.2f} {len(blocks):>7} {cells}")


def _measure(
    kv_cache: torch.Tensor, data: bytes, blocks: tuple[int, ...], num_slots: int
) -> tuple[float, float, float]:
    links = _Links()
    connector = StagingSide(links, kv_cache)
    answer, fetch = TransferKey(TransferKind.BYTES_ANSWER, "image"), TransferKey(TransferKind.BYTES_FETCH, "image")
    put_in = _timed(lambda: connector.start_step(KVConnectorMetadata(staged=(StagedBytes(answer, blocks, data),))))
    links.output.reports.append(FinishedSending(answer))
    zeroed = _timed(connector.take_output)
    reservation = Reservation(fetch, _TICKET, blocks, 0, num_slots, BytesFetch("image", "image"))
    connector.start_step(KVConnectorMetadata(reservations=(reservation,)))
    links.output.reports.append(FinishedReceiving(fetch, ReceivedKV(LoadOutcome.LOADED, num_slots)))
    return put_in, zeroed, _timed(connector.take_output)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def _shown(times_s: list[float]) -> str:
    return f"{statistics.median(times_s) * 1e3:.2f} ({min(times_s) * 1e3:.2f} to {max(times_s) * 1e3:.2f})"


if __name__ == "__main__":
    main()
