"""An ingress as users have it: both APIs, every setting as it is by default, and tokens.

In place of sessions with engines it has an engine that costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.config import ModelConfig
from actors.model_facts import ModelFacts
from actors.process.allocator import give_back_large_blocks, give_back_regularly
from actors.process.garbage_collection import collect_seldom, leave_out_what_is_loaded
from cluster.api.process import IngressProcess
from cluster.api.shared.ports import IngressPorts
from cluster.config import ClusterConfig
from cluster.sessions.session_pool import SessionPool
from cluster.settings.ingress import IngressConfig
from kv_transfer.layout import KVCacheLayout
from tests.attacks.callback_times import CallbackTimes
from tests.attacks.ingress_settings import IngressSettings
from tests.attacks.paced_engine import PacedEngine, PoolOfOne
from tests.cluster.serving_setup import FakeAdmin
from tests.trusted import member

VOCAB_SIZE: Final = 4096
EMBEDDING_SIZE: Final = 64
_LAYOUT: Final = KVCacheLayout(
    num_blocks=32,
    num_kv_heads=2,
    num_layers=2,
    block_size=16,
    head_dim=8,
    dtype="float32",
    dtype_size_bytes=4,
    model_fingerprint="model-a",
)
FACTS: Final = ModelFacts(
    max_model_len=IngressSettings().max_model_len,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(2,),
    layout=_LAYOUT,
    pooling=PoolingFacts(embedding_size=EMBEDDING_SIZE, labels=("no", "yes")),
    prompt_embeds_size=EMBEDDING_SIZE,
)
"""The demo model's tokenizer, a usual context, and every kind of request."""
_TOKEN_IDS: Final = range(300, 400)


class _Process(IngressProcess):
    """An ingress whose engine is in its own process."""

    def __init__(self, config: ClusterConfig, pool: PoolOfOne) -> None:
        super().__init__(config, FakeAdmin(), member())
        self._pool_of_one: Any = pool

    def _sessions(self) -> SessionPool:
        sessions: SessionPool = self._pool_of_one
        return sessions


async def serve_until_closed(pipe: Connection, settings: IngressSettings) -> None:
    """See ingress_child.serve()."""
    times = CallbackTimes()
    engine = PacedEngine(_TOKEN_IDS, EMBEDDING_SIZE)
    config = ClusterConfig(ingress=IngressConfig.model_validate({"port": 0, **settings.ingress}))
    if settings.model is not None:
        config = config.model_copy(update={"model": ModelConfig(model=str(settings.model))})
    process = _Process(config, PoolOfOne(engine))
    ports: IngressPorts = await process.start(replace(FACTS, max_model_len=settings.max_model_len))
    running = asyncio.create_task(engine.run())
    leave_out_what_is_loaded()
    collect_seldom()
    give_back_large_blocks()
    give_back_regularly()
    times.install()
    pipe.send(ports)
    is_over, loop = asyncio.Event(), asyncio.get_running_loop()

    def answer() -> None:
        """Runs on a thread of its own: a busy event loop must not keep the report back."""
        try:
            while pipe.recv():
                pipe.send(times.report())
        except EOFError:
            pass
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=answer, daemon=True).start()
    await is_over.wait()
    running.cancel()
    await process.drain(0)
