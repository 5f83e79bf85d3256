"""An engine serves on and others' answers do not change, whatever an ingress of the cluster sends on its session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from actors.core.requests.multimodal import EncoderInput
from actors.engine_server import EngineServer
from actors.sessions.remote_encoding import ENCODE_METHOD
from actors.sessions.session_messages import SESSION_METHOD, Abort, Submit
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.trust.grpc_proof import prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose
from tests.actors.test_hostile_requests import REQUEST, answer, check_integrity, tokens
from tests.attacks.inside.message_fuzzer import MessageFuzzer
from tests.engine_pair import engine_config
from tests.trusted import TRUST, member

NUM_SESSIONS = {"short": 25, "long": 800}
SHORT_WAITS = KVTransferConfig(transport="tcp", connect_timeout_s=1.0, ready_timeout_s=1.0, handoff_timeout_s=1.0)


def known() -> dict[str, Callable[[random.Random], Any]]:
    """Return what a hostile ingress knows: a request that this engine would take."""
    return {
        "request_id": lambda draw: draw.choice(("a", "b", "c", "victim")),
        "attempt": lambda draw: draw.choice((0, 0, 1)),
        "prompt_token_ids": lambda draw: [draw.randrange(1, 200) for _ in range(draw.choice((1, 16, 40)))],
        "output_token_ids": lambda draw: [],
        "max_tokens": lambda draw: draw.choice((1, 2, 2**31 - 1)),
        "control_address": lambda draw: "127.0.0.1:1",
        "further_rank_addresses": lambda draw: draw.choice(([], [], ["127.0.0.1:1"])),
        "eos_token_ids": lambda draw: [],
        "structured_output": lambda draw: None,
        "lora": lambda draw: None,
    }


async def hostile(address: str, method_name: str, purpose: Purpose, frames: list[bytes]) -> None:
    """Say all of it on one proven stream, and stay a moment: what was said is computed until the stream ends."""
    async with grpc.aio.insecure_channel(address) as channel:
        proof = await prove(channel, member(), purpose, Party("decode-0", 1), 60.0)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method_name)
        call = method(metadata=proof.metadata)
        await proof.confirm(call)
        try:
            for frame in frames:
                await call.write(frame)
            await call.done_writing()
            async with asyncio.timeout(0.3):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            pass
        finally:
            call.cancel()


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
async def test_an_engine_outlives_every_message_of_a_session(checkpoint: Callable[[str], Path], size: str) -> None:
    engine = EngineServer(engine_config(checkpoint("llama"), transfer=SHORT_WAITS), "decode-0", 1, TRUST)
    address = await engine.start("127.0.0.1")
    session = EngineSession(EngineDescriptor("decode-0", 1, EngineRole.BOTH, address), member(), timeout_s=60.0)
    await session.open()
    try:
        expected = tokens(await answer(session, REQUEST))
        for seed in range(NUM_SESSIONS[size]):
            submits = MessageFuzzer(Submit, seed, known())
            aborts = MessageFuzzer(Abort, seed, known())
            frames = [submits.make_hostile() for _ in range(6)] + [aborts.make_hostile()]
            # One by one: a session ends with its first message that is none.
            others = [hostile(address, SESSION_METHOD, Purpose.SESSION, [frame]) for frame in frames]
            replayed = hostile(address, SESSION_METHOD, Purpose.SESSION, [msgspec.msgpack.encode(submits.make())] * 3)
            image = MessageFuzzer(EncoderInput, seed, {}).make_hostile()
            encoded = hostile(address, ENCODE_METHOD, Purpose.ENCODE, [image])
            answering = asyncio.create_task(answer(session, REQUEST))
            await asyncio.gather(*others, replayed, encoded)
            good = await answering
            assert engine.error is None, f"seed {seed}"
            assert tokens(good) == expected, f"seed {seed}"
        await check_integrity(engine)
    finally:
        await session.close()
        await engine.stop()
