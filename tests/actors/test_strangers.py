"""A process that reaches an engine's port without the cluster's secret gets nothing, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from actors.core.requests.multimodal import EncoderInput
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_server import EngineServer
from actors.sessions.remote_encoding import ENCODE_METHOD
from actors.sessions.session_messages import SESSION_METHOD, Submit, encode
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Hello, Refused
from kv_transfer.handoff.control_messages import decode as decode_control
from kv_transfer.handoff.control_messages import encode as encode_control
from kv_transfer.links.grpc_control import CONTROL_METHOD
from kv_transfer.trust.grpc_proof import prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Trust, TrustMaterial
from kv_transfer.trust.secret import Purpose
from tests.engine_pair import engine_config
from tests.trusted import TRUST, member

TIMEOUT_S = 60.0
REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=list(range(1, 20)), sampling_params=SamplingParams(max_tokens=4, ignore_eos=True)
)

_WRITTEN_TOO_LATE = "INTERNAL: Internal error from Core"
"""grpc.aio's own word at a client whose message was not out yet when the call had ended; it hides how it ended."""


class Running:
    """An engine, and a channel to it."""

    def __init__(self, server: EngineServer, address: str, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.descriptor = EngineDescriptor("decode-0", 1, EngineRole.BOTH, address)
        self.num_calls = 0

    async def call(self, method: str, message: bytes, metadata: Any = ()) -> tuple[bytes | None, str]:
        """Make a call. Returns the first message, if any, and the status at the end."""
        end = _WRITTEN_TOO_LATE
        while end == _WRITTEN_TOO_LATE:
            self.num_calls += 1
            stream: Any = self.channel.stream_stream(method)
            call = stream(iter([message]), metadata=metadata, timeout=TIMEOUT_S)
            try:
                first = await call.read()
            except grpc.aio.AioRpcError as error:
                end = f"{error.code().name}: {error.details()}"
            else:
                return (None if first is grpc.aio.EOF else first), ""
            finally:
                call.cancel()
        return None, end

    async def answer(self, request_id: str) -> list[int]:
        """Return what the engine answers an ingress of its cluster."""
        session = EngineSession(self.descriptor, member(), timeout_s=TIMEOUT_S)
        await session.open()
        request = replace(REQUEST, request_id=request_id)
        tokens = [token async for output in session.submit(request) for token in output.new_token_ids]
        await session.close()
        await self.num_taken_requests()
        return tokens

    async def num_taken_requests(self) -> int:
        """Wait until the engine has no request, and return how many it has had."""
        async with asyncio.timeout(TIMEOUT_S):
            # An idle engine's thread looks for work now and then, and does not count as idle for that moment.
            while not self.server.is_idle or self.server.stats.load_report is None:  # noqa: ASYNC110  # another thread
                await asyncio.sleep(0.01)
        load = self.server.stats_for(0).load_report
        assert load is not None
        return load.num_taken_from_all

    async def wait_refused(self, kind: str, count: int) -> None:
        """Until the engine's counters, as an ingress sees them, show so many messages of this kind."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.server.stats.all_refused_messages.get(kind) != count:  # noqa: ASYNC110  # another thread
                await asyncio.sleep(0.02)


@pytest.fixture
async def engine(checkpoint: Callable[[str], Path]) -> AsyncIterator[Running]:
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp", link_timeout_s=60.0))
    server = EngineServer(config, "decode-0", 1, TRUST)
    address = await server.start("127.0.0.1")
    async with grpc.aio.insecure_channel(address) as channel:
        yield Running(server, address, channel)
    await server.stop()


def messages(engine: Running) -> dict[str, bytes]:
    """Return a message that would do harm, for each method."""
    layout = engine.server.facts.layout
    hello = Hello(PROTOCOL_VERSION, "prefill-9", 1, "decode-0", 1, "tcp", layout)
    return {
        SESSION_METHOD: encode(Submit([REQUEST], 0.0)),
        CONTROL_METHOD: encode(hello),
        ENCODE_METHOD: encode(EncoderInput("hash", {})),
    }


async def test_a_stranger_is_told_nothing_and_does_nothing(engine: Running, caplog: pytest.LogCaptureFixture) -> None:
    expected = await engine.answer("before")
    for method, message in messages(engine).items():
        first, end = await engine.call(method, message)
        assert first is None
        assert end == (
            "UNAUTHENTICATED: refused by raypd, handshake protocol 3: "
            "it sent no proof of the cluster's secret (handshake protocol 3)"
        )
    assert dict(engine.server.refusals.counts) == {"not_raypd": 3}
    assert await engine.num_taken_requests() == 1
    warned = [record for record in caplog.records if record.name == "kv_transfer.trust.refusals"]
    assert len(warned) == 1, "a peer is logged once"
    assert await engine.answer("after") == expected


async def test_a_guessed_secret_opens_nothing(engine: Running) -> None:
    stranger = member(trust=Trust(TrustMaterial.draw()))
    with pytest.raises(EngineLost, match="does not know the cluster's secret"):
        await EngineSession(engine.descriptor, stranger, timeout_s=TIMEOUT_S).open()
    assert await engine.num_taken_requests() == 0


async def test_a_replayed_hello_is_refused_on_every_kind_of_connection(engine: Running) -> None:
    for purpose, method in (
        (Purpose.SESSION, SESSION_METHOD),
        (Purpose.CONTROL, CONTROL_METHOD),
        (Purpose.ENCODE, ENCODE_METHOD),
    ):
        proof = await prove(engine.channel, member(), purpose, Party("decode-0", 1), TIMEOUT_S)
        stream: Any = engine.channel.stream_stream(method)
        genuine = stream(metadata=proof.metadata, timeout=TIMEOUT_S)
        await proof.confirm(genuine)
        assert await engine.call(method, messages(engine)[method], proof.metadata) == (
            None,
            "UNAUTHENTICATED: refused by raypd, handshake protocol 3: its proof has been used before",
        )
        genuine.cancel()


async def test_a_proof_for_one_kind_of_connection_opens_no_other(engine: Running) -> None:
    proof = await prove(engine.channel, member(), Purpose.ENCODE, Party("decode-0", 1), TIMEOUT_S)
    first, end = await engine.call(SESSION_METHOD, messages(engine)[SESSION_METHOD], proof.metadata)
    assert first is None
    assert end.startswith("UNAUTHENTICATED")


async def test_many_strangers_leave_an_engine_as_it_was(engine: Running) -> None:
    expected = await engine.answer("before")
    method, message = SESSION_METHOD, messages(engine)[SESSION_METHOD]
    answers = await asyncio.gather(*(engine.call(method, message) for _ in range(300)))
    assert {end.partition(":")[0] for _, end in answers} == {"UNAUTHENTICATED"}
    assert engine.server.refusals.total == engine.num_calls >= 300
    assert await engine.answer("after") == expected


async def test_a_member_that_says_hello_in_another_engines_name_is_refused_and_counted(engine: Running) -> None:
    expected = await engine.answer("before")
    hello = Hello(PROTOCOL_VERSION, "prefill-0", 1, "decode-0", 1, "tcp", engine.server.facts.layout)
    for claimed in (hello, msgspec.structs.replace(hello, engine_id="prefill-9", incarnation=2)):
        proof = await prove(engine.channel, member("prefill-9"), Purpose.CONTROL, Party("decode-0", 1), TIMEOUT_S)
        stream: Any = engine.channel.stream_stream(CONTROL_METHOD)
        call = stream(metadata=proof.metadata, timeout=TIMEOUT_S)
        await proof.confirm(call)
        await call.write(encode_control(claimed))
        refused = decode_control(await call.read())
        call.cancel()
        assert isinstance(refused, Refused)
        assert refused.reason.endswith("and has proven to be prefill-9, incarnation 1")
    await engine.wait_refused("hello refused", 2)
    assert await engine.answer("after") == expected


async def test_a_call_to_encode_that_is_no_image_is_refused_and_counted(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await engine.answer("before")
    for message in (b"", b"\xc1", encode(EncoderInput("hash", {}))[:-2]):
        proof = await prove(engine.channel, member("prefill-9"), Purpose.ENCODE, Party("decode-0", 1), TIMEOUT_S)
        stream: Any = engine.channel.stream_stream(ENCODE_METHOD)
        call = stream(metadata=proof.metadata, timeout=TIMEOUT_S)
        await proof.confirm(call)
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
            await call.read()
    assert engine.server.stats.all_refused_messages == {"malformed image": 3}
    assert len([record for record in caplog.records if vars(record).get("kind") == "malformed image"]) == 1
    assert await engine.answer("after") == expected
