"""An ingress's other sessions go on and no stream hangs, whatever an engine of the cluster sends on its session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import msgspec
import pytest

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.sessions.session_messages import SESSION_METHOD, EngineMessage, Hello, Outputs, Taken, encode
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose
from tests.attacks.inside.message_fuzzer import MessageFuzzer
from tests.trusted import TRUST, member

NUM_SESSIONS = {"short": 40, "long": 3000}
HELLO = encode(Hello("decode-0", 1))
REQUEST = EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams())
TOO_LONG = msgspec.msgpack.encode({"type": "outputs", "batch": {"finished_req_ids": ["a" * 5000]}})
COLUMNS = {"req_ids": ["a"], "attempts": [], "first_positions": [0], "token_ids": [1]}
NOT_PARALLEL = msgspec.msgpack.encode({"type": "outputs", "batch": {"decoded": COLUMNS}})
MALFORMED = "it sent a malformed message"
BROKEN = "the session broke"
# An engine that leaves while the ingress writes to it looks broken to gRPC: a few sessions in a thousand end like that,
# more of them on a busy machine.
ENDS = (MALFORMED, "it closed the session", BROKEN, "an answer")
TIMEOUT_S = 60.0
MOST_BROKEN = 20
"""Sessions that may break before one ends for its reason."""


class HostileEngine:
    """Belongs to the cluster, and says these frames to whoever opens a session."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def serve(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        await self._acceptor.check(context, Purpose.SESSION)
        for frame in self.frames:
            yield frame
        async for _ in messages:  # The request may still be on its way.
            break

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        self._acceptor = GrpcAcceptor(TRUST)
        self._acceptor.register(Purpose.SESSION, Party("decode-0", 1))
        service, method = SESSION_METHOD.strip("/").split("/")
        serve: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.serve)
        return grpc.method_handlers_generic_handler(service, {method: serve}), self._acceptor.handler()


@asynccontextmanager
async def hostile_engine() -> AsyncIterator[tuple[HostileEngine, EngineDescriptor]]:
    engine, server = HostileEngine(), grpc.aio.server()
    server.add_generic_rpc_handlers(engine.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield engine, EngineDescriptor("decode-0", 1, EngineRole.DECODE, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


async def outcome(descriptor: EngineDescriptor, refused: RefusedMessages) -> str:
    """Open a session, ask for an answer, and return how that ends, which it does."""
    session = EngineSession(descriptor, member(), TIMEOUT_S, refused)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await session.open()
            async for _ in session.submit(REQUEST):
                pass
    except EngineLost as error:
        return str(error)
    finally:
        await session.close()
    return "an answer"


def known() -> dict[str, Callable[[random.Random], Any]]:
    """Return what a hostile engine knows: the request that it was given."""
    return {"request_id": lambda draw: draw.choice(("a", "a", "b")), "attempt": lambda draw: 0}


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
async def test_an_ingress_outlives_every_message_of_an_engine(size: str) -> None:
    refused = RefusedMessages()
    async with hostile_engine() as (engine, descriptor):
        outcomes: dict[str, int] = {}
        fuzzer, batches = MessageFuzzer(EngineMessage, 1, known()), MessageFuzzer(Outputs, 2, known())
        for _ in range(NUM_SESSIONS[size]):
            engine.frames = [HELLO, *(batches.make_hostile() for _ in range(4)), fuzzer.make_hostile()]
            ended = await outcome(descriptor, refused)
            how = next((end for end in ENDS if end in ended), ended)
            outcomes[how] = outcomes.get(how, 0) + 1
    assert set(outcomes) <= set(ENDS), outcomes
    assert outcomes.get(BROKEN, 0) < NUM_SESSIONS[size] / 4, outcomes
    assert refused.counts() == {"malformed engine message": outcomes[MALFORMED]}


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "it sent a malformed message"),
        ([b"\xc1" * 10], "it sent a malformed message"),
        ([HELLO, HELLO], "a Hello came in the middle of the session"),
        ([encode(Hello("decode-1", 1))], "expected Hello"),
        ([encode(Hello("decode-0", 2))], "expected Hello"),
        ([encode(Taken())], "expected Hello"),
        ([HELLO, *[encode(Taken())] * 3], "it acknowledged more messages than were sent"),
        ([HELLO, TOO_LONG], MALFORMED),
        ([HELLO, NOT_PARALLEL], "have different lengths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_out_of_turn_or_range_ends_the_session_with_the_reason(frames: list[bytes], reason: str) -> None:
    async with hostile_engine() as (engine, descriptor):
        engine.frames = frames
        for _ in range(MOST_BROKEN):
            ended = await outcome(descriptor, RefusedMessages())
            if BROKEN not in ended:
                break
        assert reason in ended
