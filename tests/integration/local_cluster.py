"""A cluster without Ray: engine servers and an ingress in one process, joined by gRPC and TCP on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.config import EngineConfig
from actors.core.requests.block_hash import BlockHash, BlockHasher, BlockHashKey, ExtraKeys
from actors.engine_server import EngineServer
from actors.recording_config import DecisionRecordingConfig
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.serving import Serving
from cluster.routing.base import Router
from cluster.routing.cost_router import CostRouter
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.prefix_index import PrefixIndex
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.routing.recording.recorded_routing import RecordedLoadBook, RoutingRecorder
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from cluster.settings.ingress import IngressConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from kv_transfer.trust.membership import Trust
from tests.trusted import TRUST, member

_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """serving takes the requests; the engines can be looked into."""

    serving: Serving
    pool: SessionPool
    engines: dict[str, EngineServer]
    prefix_index: PrefixIndex

    async def until_it_is_known_to_have(self, engine_id: str, token_ids: list[int]) -> None:
        """Wait until the index knows that the engine has every full block of these tokens."""
        block_size = self.engines[engine_id].stats.block_size
        hashes: list[BlockHash] = []
        BlockHasher(block_size, BlockHashKey(TRUST.block_hash_key)).extend(hashes, token_ids, ExtraKeys())
        async with asyncio.timeout(_TIMEOUT_S):
            while self.prefix_index.find(hashes).get((engine_id, 1), 0) < len(hashes):  # noqa: ASYNC110  # the engine reports
                await asyncio.sleep(0.02)


@asynccontextmanager
async def local_cluster(
    config: EngineConfig,
    *decode_configs: EngineConfig,
    migrates_preempted: bool = True,
    trust: Trust = TRUST,
    only: EngineRole | None = None,
    recording: DecisionRecordingConfig | None = None,
) -> AsyncIterator[LocalCluster]:
    """One prefill engine, and a decode engine of each of these configurations, or one of the same.

    only: two engines of this role instead, and no other
    recording: requests are routed by cost, and routes are recorded so
    """
    if only is None:
        configs = {"prefill-0": config}
        configs |= {f"decode-{number}": each for number, each in enumerate(decode_configs or (config,))}
    else:
        configs = {f"{only.value}-{number}": config for number in range(2)}
    engines = {name: EngineServer(each, name, 1, trust) for name, each in configs.items()}
    block_size = config.cache.block_size
    hash_key = BlockHashKey(trust.block_hash_key)
    recorder, book = RoutingRecorder.begin(recording, "ingress-0", hash_key), None
    indexes = PrefixIndexes() if recorder is None else PrefixIndexes(make_index=recorder.make_index)
    index = indexes.make(1, block_size)
    router: Router = PrefixAwarePair(block_size, index, hash_key=hash_key)
    if recorder is not None:
        book = RecordedLoadBook(recorder)
        plain = CostRouter(PrefixAwarePair(block_size, index, hash_key=hash_key), book)
        router = recorder.make_router(plain, index, block_size, RoutingMode.COST, is_aggregated=False)
    pool = SessionPool(member(trust=trust), 10.0, load_book=book, indexes=indexes)
    try:
        membership = Membership(0, ())
        for name, engine in engines.items():
            role = EngineRole(name.partition("-")[0])
            address = await engine.start("127.0.0.1")
            membership = membership.with_engine(EngineDescriptor(name, 1, role, address))
        await pool.update(membership)
        facts = next(reversed(engines.values())).facts
        description = ModelDescription.of("test", facts)
        tokenizer = ModelTokenizer.from_directory(Path(config.model.model), use_fastokens=True)
        versions = ModelVersions(ModelVersion(1, InputProcessor(description, tokenizer), router))
        planner = MigrationPlanner(pool.stats) if migrates_preempted else None
        serving = Serving(versions, pool, IngressConfig(), migration_planner=planner)
        yield LocalCluster(serving, pool, engines, indexes.make(1, block_size))
    finally:
        await pool.close()
        if recorder is not None:
            recorder.close()
        for engine in engines.values():
            await engine.stop()
