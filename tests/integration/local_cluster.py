"""A cluster without Ray: engine servers and an ingress in one process, joined by gRPC and TCP on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.config import EngineConfig
from actors.core.requests.block_hash import BlockHashKey
from actors.engine_server import EngineServer
from cluster.requests.migration import MigrationPlanner
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from cluster.settings.ingress import IngressConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from kv_transfer.trust.membership import Trust
from tests.trusted import TRUST, member


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """serving takes the requests; the engines can be looked into."""

    serving: Serving
    pool: SessionPool
    engines: dict[str, EngineServer]


@asynccontextmanager
async def local_cluster(
    config: EngineConfig, *decode_configs: EngineConfig, migrates_preempted: bool = True, trust: Trust = TRUST
) -> AsyncIterator[LocalCluster]:
    """One prefill engine, and a decode engine of each of these configurations, or one of the same."""
    engines = {"prefill-0": EngineServer(config, "prefill-0", 1, trust)}
    for number, decode_config in enumerate(decode_configs or (config,)):
        engines[f"decode-{number}"] = EngineServer(decode_config, f"decode-{number}", 1, trust)
    pool = SessionPool(member(trust=trust), timeout_s=10.0)
    try:
        membership = Membership(0, ())
        for name, engine in engines.items():
            role = EngineRole(name.partition("-")[0])
            address = await engine.start("127.0.0.1")
            membership = membership.with_engine(EngineDescriptor(name, 1, role, address))
        await pool.update(membership)
        facts = engines["decode-0"].facts
        description = ModelDescription.of("test", facts)
        tokenizer = ModelTokenizer.from_directory(Path(config.model.model), use_fastokens=True)
        router = PrefixAwarePair(facts.layout.block_size, hash_key=BlockHashKey(trust.block_hash_key))
        versions = ModelVersions(ModelVersion(1, InputProcessor(description, tokenizer), router))
        planner = MigrationPlanner(pool.stats) if migrates_preempted else None
        serving = Serving(versions, pool, IngressConfig(), migration_planner=planner)
        yield LocalCluster(serving, pool, engines)
    finally:
        await pool.close()
        for engine in engines.values():
            await engine.stop()
