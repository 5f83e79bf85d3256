"""An ingress that the network has swallowed, while nobody tells the engines, leaves nothing behind on them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors import engine_server
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_server import EngineServer
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from tests.engine_pair import engine_config
from tests.kv_transfer.swallowing_proxy import SwallowingProxy
from tests.trusted import TRUST, member

_TIMEOUT_S = 60.0


async def test_what_a_swallowed_ingress_had_on_an_engine_is_aborted(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = {"grpc.keepalive_time_ms": 300, "grpc.http2.ping_timeout_ms": 3_000}
    monkeypatch.setattr(engine_server, "_SERVER_OPTIONS", [*(dict(engine_server._SERVER_OPTIONS) | impatient).items()])
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp"))
    engine = EngineServer(config, "decode-0", 1, TRUST)
    address = await engine.start("127.0.0.1")
    with SwallowingProxy(int(address.rpartition(":")[2])) as proxy, socket.create_server(("127.0.0.1", 0)) as mute:
        session = EngineSession(
            EngineDescriptor("decode-0", 1, EngineRole.DECODE, proxy.address), member(), timeout_s=_TIMEOUT_S
        )
        await session.open()
        # It waits for a producer that never says a word.
        producer = EngineAddress("prefill-0", 1, f"127.0.0.1:{mute.getsockname()[1]}")
        ticket = KVTransferParams("t", 0, TransferRole.CONSUMER, producer)
        request = EngineCoreRequest(request_id="r", prompt_token_ids=[5] * 40, sampling_params=SamplingParams())
        session.submit(replace(request, kv_transfer_params=ticket))
        await _until(lambda: engine.stats.num_waiting_for_remote_kvs == 1)
        proxy.swallow()
        await _until(lambda: engine.stats.num_waiting_for_remote_kvs == 0)
        assert engine.stats.num_running_reqs == engine.stats.num_waiting_reqs == 0, "it was aborted"
        assert engine.stats.num_prompt_tokens_computed == 0, "and not computed here instead"
        await session.close()
        await engine.stop()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110  # the engine's thread
            await asyncio.sleep(0.02)
