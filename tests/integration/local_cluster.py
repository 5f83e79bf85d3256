"""A cluster without Ray: two engine servers and an ingress in one process, joined by gRPC and TCP on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.config import EngineConfig
from actors.engine_server import EngineServer
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.input_processor import InputProcessor, ModelDescription
from cluster.model_tokenizer import ModelTokenizer
from cluster.model_versions import ModelVersion, ModelVersions
from cluster.pool.membership import Membership
from cluster.pool.session_pool import SessionPool
from cluster.router.prefix_aware import PrefixAwarePair
from cluster.serving import Serving


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """serving is the door; the engines can be looked into."""

    serving: Serving
    pool: SessionPool
    engines: dict[str, EngineServer]


@asynccontextmanager
async def local_cluster(config: EngineConfig) -> AsyncIterator[LocalCluster]:
    """One prefill and one decode engine of the same configuration."""
    engines = {
        "prefill-0": EngineServer(config, "prefill-0", 1),
        "decode-0": EngineServer(config, "decode-0", 1),
    }
    pool = SessionPool()
    try:
        membership = Membership(0, ())
        for (name, engine), role in zip(engines.items(), (EngineRole.PREFILL, EngineRole.DECODE), strict=True):
            address = await engine.start("127.0.0.1")
            membership = membership.with_engine(EngineDescriptor(name, 1, role, address))
        await pool.update(membership)
        facts = engines["decode-0"].facts
        description = ModelDescription("test", facts.max_model_len, facts.vocab_size, facts.eos_token_ids)
        tokenizer = ModelTokenizer.from_directory(Path(config.model.model))
        router = PrefixAwarePair(facts.layout.block_size)
        serving = Serving(ModelVersions(ModelVersion(1, InputProcessor(description, tokenizer), router)), pool)
        yield LocalCluster(serving, pool, engines)
    finally:
        await pool.close()
        for engine in engines.values():
            await engine.stop()
