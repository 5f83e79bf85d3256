"""Both ends of a session over real gRPC, with an engine that only remembers what it was told.

Tests of actors/sessions/session_messages.py, actors/sessions/session_server.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

import grpc
import pytest

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request import EngineCoreRequest, FinishReason, PromptEmbeds
from actors.core.requests.sampling_params import SamplingParams
from actors.sessions import session_server
from actors.sessions.block_messages import CachedBlocks
from actors.sessions.session_messages import SESSION_METHOD, Hello, Outputs, Submit, decode_engine_message, encode
from actors.sessions.session_server import SessionServer
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.sessions import session_pool
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session import EngineSession
from cluster.sessions.session_pool import SessionPool
from kv_transfer.link_load import LinkLoad
from kv_transfer.message_ranges import MAX_KINDS
from kv_transfer.trust.grpc_proof import GrpcAcceptor, prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose
from tests.trusted import TRUST, member

_TIMEOUT_S = 60.0


class RememberingEngine:
    def __init__(self) -> None:
        self.commands: asyncio.Queue[tuple[str, str, int]] = asyncio.Queue()
        self.submitted: list[EngineCoreRequest] = []
        self.load = LoadReport(5, num_free_blocks=3, links=(LinkLoad("decode-1", 2**40, 1e9, 0.001),))
        self.stats = SchedulerStats(num_running_reqs=7, load_report=self.load)

    def stats_for(self, client_index: int) -> SchedulerStats:
        return replace(self.stats, load_report=replace(self.load, num_taken_requests=len(self.submitted)))

    async def send_cached_blocks(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> int | None:
        self.commands.put_nowait(("send_cached_blocks", "", 0))
        return None

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        return None

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        self.submitted += requests
        for request in requests:
            self.commands.put_nowait(("submit", request.request_id, client_index))

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        for request_id, _ in requests:
            self.commands.put_nowait(("abort", request_id, client_index))

    async def next_command(self) -> tuple[str, str, int]:
        return await asyncio.wait_for(self.commands.get(), _TIMEOUT_S)


class Served:
    def __init__(
        self,
        engine: RememberingEngine,
        server: SessionServer,
        grpc_server: grpc.aio.Server,
        descriptor: EngineDescriptor,
    ) -> None:
        self.engine, self.server, self.grpc_server = engine, server, grpc_server
        self.descriptor = descriptor

    def deliver(self, client_index: int, *outputs: EngineCoreOutput, finished: set[str] | None = None) -> None:
        self.server.deliver({client_index: EngineCoreOutputs(list(outputs), finished or set())})


@asynccontextmanager
async def serving(engine_id: str = "decode-0") -> AsyncIterator[Served]:
    engine = RememberingEngine()
    grpc_server = grpc.aio.server()
    acceptor = GrpcAcceptor(TRUST)
    server = SessionServer(engine, engine_id, 1, acceptor)
    grpc_server.add_generic_rpc_handlers((server.handler(), acceptor.handler()))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        descriptor = EngineDescriptor(engine_id, 1, EngineRole.DECODE, f"127.0.0.1:{port}")
        yield Served(engine, server, grpc_server, descriptor)
    finally:
        await grpc_server.stop(0)


async def proof_for(channel: grpc.aio.Channel) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata of a call to decode-0."""
    return (await prove(channel, member(), Purpose.SESSION, Party("decode-0", 1), _TIMEOUT_S)).metadata


def request(request_id: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=SamplingParams())


def output(request_id: str, position: int, finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id, attempt=0, new_token_ids=[position], first_position=position, finish_reason=finish_reason
    )


async def collect(stream: AsyncIterator[EngineCoreOutput]) -> list[int]:
    async with asyncio.timeout(_TIMEOUT_S):
        return [item.first_position async for item in stream]


async def test_outputs_reach_the_stream_of_their_request_until_the_finished_one() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        stream_a, stream_b = session.submit(request("a")), session.submit(request("b"))
        _, _, client = await served.engine.next_command()
        await served.engine.next_command()
        served.deliver(client, output("a", 0), output("b", 0))
        served.deliver(client, output("a", 1, FinishReason.LENGTH), output("b", 1))
        served.deliver(client, output("b", 2, FinishReason.STOP))
        assert await collect(stream_a) == [0, 1]
        assert await collect(stream_b) == [0, 1, 2]
        assert session.num_unfinished_requests == 0
        await session.close()


async def test_load_reports_say_which_requests_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_HEARTBEAT_S", 0.01)
    async with serving() as served, asyncio.timeout(_TIMEOUT_S):
        monkeypatch.setattr(served.engine, "find_mistake", lambda given: "no" if given.request_id == "bad" else None)
        book = LoadBook()
        session = EngineSession(served.descriptor, member(), timeout_s=60.0, load_book=book)
        await session.open()
        stream, _, _ = (session.submit(request(name)) for name in ("a", "bad", "b"))
        _, _, client = await served.engine.next_command()
        position = 0
        while (load := session.load_report) is None or load.num_taken_requests < 3:
            served.deliver(client, output("a", position))
            assert (await anext(stream)).first_position == position
            position += 1
        assert session.num_submitted_requests == 3
        assert load == replace(served.engine.load, num_taken_requests=3)
        assert book.work_of(served.descriptor).num_free_blocks == load.num_free_blocks == 3
        await session.close()


def _has_reported(session: EngineSession) -> bool:
    return session.load_report is not None


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  # Nothing tells of what a load book takes in.
        await asyncio.sleep(0.001)


async def test_ingresses_hear_at_once_what_the_others_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_HEARTBEAT_S", 0.01)
    works = [SentWork(100, 0.5, 100), SentWork(200, 0.7, consumer="decode-1", num_handoff_bytes=1e6)]
    async with serving() as served, asyncio.timeout(_TIMEOUT_S):
        books = [LoadBook() for _ in range(3)]
        sessions = [EngineSession(served.descriptor, member(), timeout_s=60.0, load_book=book) for book in books]
        for session in sessions:
            await session.open()
        for session in sessions:
            await _until(partial(_has_reported, session))
        own, *others = (book.work_of(served.descriptor) for book in books)
        sessions[1].submit(request("before"))
        await served.engine.next_command()
        assert not any(one.announced for one in (own, *others)), "nothing was announced"
        for name, work in zip("ab", works, strict=True):
            sessions[0].submit(request(name))
            books[0].note_sent(served.descriptor, name, work)
        await _until(lambda: all(len(one.announced) == 2 for one in others))
        assert [one.work for one in others[0].announced] == works
        assert {one.ordinal for one in others[0].announced} == {3}, "the engine has got three requests by then"
        assert (own.num_decodes, others[1].num_decodes) == (1, 1)
        assert not own.announced
        served.engine.load = replace(served.engine.load, number=6, num_taken_from_all=3, num_decodes=1)
        await _until(lambda: not others[0].announced and not others[1].announced)
        books[0].note_left(served.descriptor.key, "a")
        await _until(lambda: others[0].num_decodes == others[1].num_decodes == 0)
        for session in sessions:
            await session.close()


async def test_more_announcements_than_one_message_may_have_are_all_heard() -> None:
    num_works = MAX_KINDS + 1
    async with serving() as served, asyncio.timeout(_TIMEOUT_S):
        books = [LoadBook() for _ in range(2)]
        sessions = [EngineSession(served.descriptor, member(), timeout_s=60.0, load_book=book) for book in books]
        for session in sessions:
            await session.open()
        for session in sessions:
            await _until(partial(_has_reported, session))
        sessions[0].submit(request("a"))
        for _ in range(num_works):
            sessions[0].announce(SentWork(num_context_tokens=7))
        heard = books[1].work_of(served.descriptor)
        await _until(lambda: sessions[0].is_lost or heard.num_decodes == num_works)
        assert heard.num_decodes == num_works
        for session in sessions:
            await session.close()


async def test_large_requests_do_not_add_up_to_a_message_that_nobody_takes() -> None:
    async with serving() as served:  # It takes 4 MiB.
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        data = bytes(3 * 2**20)
        embeds = PromptEmbeds(data, num_tokens=1, hidden_size=3 * 2**18, dtype="float32", digest=b"")
        image = EncoderInput("hash", {"pixel_values": PackedArray("uint8", (len(data),), data)})
        session.submit(request("a"))
        session.submit(replace(request("b"), prompt_embeds=embeds))
        session.submit(request("c"))
        session.submit(replace(request("d"), encoder_inputs=(image,)))
        assert [(await served.engine.next_command())[1] for _ in range(4)] == ["a", "c", "b", "d"]
        await session.close()


async def test_a_request_that_the_engine_lets_go_of_ends_silently() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        stream = session.submit(request("a"))
        _, _, client = await served.engine.next_command()
        served.deliver(client, finished={"a"})
        assert await collect(stream) == []
        await session.close()


async def test_an_abort_ends_the_stream_here_and_the_request_there() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        stream = session.submit(request("a"))
        await served.engine.next_command()
        session.abort("a")
        session.abort("a")
        assert await collect(stream) == []
        assert (await served.engine.next_command())[:2] == ("abort", "a")
        await session.close()


async def test_what_a_client_had_running_is_aborted_when_it_hangs_up() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        for name in ("done", "running"):
            session.submit(request(name))
        _, _, client = await served.engine.next_command()
        await served.engine.next_command()
        served.deliver(client, output("done", 0, FinishReason.STOP))
        await asyncio.sleep(0)
        await session.close()
        assert (await served.engine.next_command())[:2] == ("abort", "running")
        assert served.engine.commands.empty()


async def test_every_open_stream_fails_when_the_engine_goes_away() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        stream = session.submit(request("a"))
        await served.engine.next_command()
        await served.grpc_server.stop(0)
        with pytest.raises(EngineLost, match="decode-0"):
            await collect(stream)
        with pytest.raises(EngineLost):
            await collect(session.submit(request("b")))
        assert session.is_lost
        await session.close()


@pytest.mark.parametrize("reads", [False, True])
async def test_an_engine_that_has_died_had_the_requests_that_it_said_it_had(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_read(*_: object) -> None:
        await asyncio.Event().wait()

    if not reads:
        monkeypatch.setattr(SessionServer, "_read", never_read)
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        first = session.submit(request("a"))
        if reads:
            async with asyncio.timeout(_TIMEOUT_S):
                while not first.is_taken:  # noqa: ASYNC110  # the session's reader sets it
                    await asyncio.sleep(0.001)
        await served.grpc_server.stop(0)
        for stream, had_request in ((first, reads), (session.submit(request("b")), False)):
            with pytest.raises(EngineLost) as raised:
                await collect(stream)
            assert raised.value.had_request == had_request
        await session.close()


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
async def test_the_time_that_is_left_travels_not_the_clock(skew_s: float) -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.descriptor.address) as channel:
        method = channel.stream_stream(
            SESSION_METHOD, request_serializer=encode, response_deserializer=decode_engine_message
        )
        call = method(metadata=await proof_for(channel))
        async with asyncio.timeout(_TIMEOUT_S):
            await call.read()
            now_s = time.monotonic() + skew_s
            hasty = replace(request("hasty"), arrival_time_s=now_s - 2.0, deadline_s=now_s + 5.0)
            sent_s = time.monotonic()
            await call.write(Submit([hasty, request("patient")], now_s))
            await served.engine.next_command()
        call.cancel()
        received, patient = served.engine.submitted
        assert received.deadline_s is not None
        assert sent_s - 0.1 < received.deadline_s - 5.0 < time.monotonic() + 0.1
        assert received.deadline_s - received.arrival_time_s == pytest.approx(7.0)
        assert patient.deadline_s is None


async def test_a_dead_engine_hangs_up_at_once_and_for_good() -> None:
    async with serving() as served:
        session = EngineSession(served.descriptor, member(), timeout_s=60.0)
        await session.open()
        stream = session.submit(request("a"))
        await served.engine.next_command()
        await asyncio.to_thread(served.server.hang_up, "out of memory")
        with pytest.raises(EngineLost, match="closed the session"):
            await collect(stream)
        await session.close()
        with pytest.raises(EngineLost, match="no answer"):
            await EngineSession(served.descriptor, member(), timeout_s=60.0).open()


async def test_an_idle_engine_sends_a_heartbeat_with_its_counters() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.descriptor.address) as channel:
        method = channel.stream_stream(
            SESSION_METHOD, request_serializer=encode, response_deserializer=decode_engine_message
        )
        call = method(metadata=await proof_for(channel))
        async with asyncio.timeout(_TIMEOUT_S):
            assert await call.read() == Hello("decode-0", 1)
            heartbeat = await call.read()
        assert isinstance(heartbeat, Outputs)
        assert heartbeat.batch.scheduler_stats is not None
        assert heartbeat.batch.scheduler_stats.num_running_reqs == 7
        call.cancel()


async def test_a_busy_engine_tells_its_counters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sessions.session_server._HEARTBEAT_S", 0.02)
    async with serving() as served, grpc.aio.insecure_channel(served.descriptor.address) as channel:
        method = channel.stream_stream(
            SESSION_METHOD, request_serializer=encode, response_deserializer=decode_engine_message
        )
        call = method(metadata=await proof_for(channel))
        num_told = 0
        async with asyncio.timeout(_TIMEOUT_S):
            assert await call.read() == Hello("decode-0", 1)
            while num_told < 3:
                # Two for each that is read: there is always one more.
                served.deliver(1, output("a", 0))
                served.deliver(1, output("a", 1))
                message = await call.read()
                assert isinstance(message, Outputs)
                num_told += bool(message.batch.outputs and message.batch.scheduler_stats is not None)
        call.cancel()


async def _opened(descriptor: EngineDescriptor, timeout_s: float) -> EngineSession:
    while True:
        session = EngineSession(descriptor, member(), timeout_s=timeout_s)
        with suppress(EngineLost):  # A busy machine may not be in time itself.
            await session.open()
            return session


async def test_a_silent_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_HEARTBEAT_S", 60.0)
    async with serving() as served:
        session = await _opened(served.descriptor, timeout_s=1.0)
        with pytest.raises(EngineLost, match=r"silent for 1\.0 s"):
            await collect(session.submit(request("a")))
        await session.close()


async def test_a_silent_engine_gets_nothing_new_where_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_HEARTBEAT_S", 60.0)
    monkeypatch.setattr(session_pool, "_NOTICED_SILENCE_S", 0.3)
    async with serving() as quiet, serving("decode-1") as talking:
        pool = SessionPool(member(), timeout_s=60.0)
        await pool.update(Membership(1, (quiet.descriptor, talking.descriptor)))
        [session] = [session for session in pool.snapshot() if session.descriptor == talking.descriptor]
        stream = session.submit(request("a"))
        _, _, client_index = await talking.engine.next_command()
        await asyncio.sleep(0.4)
        assert len(pool.snapshot()) == 2, "nobody answers: it may be this process that was stopped"
        for position in count():  # On a busy machine it may have been silent for as long itself by now.
            talking.deliver(client_index, output("a", position))
            assert (await anext(stream)).first_position == position
            if [session.descriptor for session in pool.snapshot()] == [talking.descriptor]:
                break
        await pool.close()


async def test_another_incarnation_at_the_same_address_is_refused() -> None:
    async with serving() as served:
        old = EngineDescriptor("decode-0", 9, EngineRole.DECODE, served.descriptor.address)
        with pytest.raises(EngineLost, match="belongs to this cluster, but is not decode-0, incarnation 9"):
            await EngineSession(old, member(), timeout_s=60.0).open()


async def test_the_pool_follows_newer_memberships_and_ignores_older_ones() -> None:
    async with serving() as served:
        pool = SessionPool(member(), timeout_s=60.0)
        await pool.update(Membership(2, (served.descriptor,)))
        await pool.update(Membership(1, ()))
        assert [connection.descriptor for connection in pool.snapshot()] == [served.descriptor]
        await pool.update(Membership(3, ()))
        assert list(pool.snapshot()) == []
        await pool.close()


async def test_an_engine_that_drains_gets_nothing_new_and_ends_what_it_has() -> None:
    async with serving() as served:
        pool = SessionPool(member(), timeout_s=60.0)
        members = Membership(1, (served.descriptor,))
        await pool.update(members)
        stream = pool.snapshot()[0].submit(request("a"))
        _, _, client_index = await served.engine.next_command()
        await pool.update(members.with_draining("decode-0", 1))
        assert list(pool.snapshot()) == []
        served.deliver(client_index, output("a", 0, FinishReason.LENGTH))
        assert await collect(stream) == [0]
        await pool.close()


@pytest.mark.parametrize("is_drained", [True, False])
async def test_what_a_drained_engine_could_not_end_is_no_sign_of_its_death(is_drained: bool) -> None:
    async with serving() as served:
        pool = SessionPool(member(), timeout_s=60.0)
        members = Membership(1, (served.descriptor,))
        await pool.update(members)
        stream = pool.snapshot()[0].submit(request("a"))
        await served.engine.next_command()
        if is_drained:
            members = members.with_draining("decode-0", 1)
            await pool.update(members)
        await pool.update(members.without_engine("decode-0", 1))
        with pytest.raises(EngineLost) as raised:
            await collect(stream)
        assert raised.value.has_left is is_drained
        await pool.close()


async def test_a_lost_session_is_opened_again_while_its_engine_is_a_member() -> None:
    async with serving() as served:
        pool = SessionPool(member(), timeout_s=60.0)
        await pool.update(Membership(1, (served.descriptor,)))
        [session] = pool.snapshot()
        assert isinstance(session, EngineSession)
        await session.close()
        assert list(pool.snapshot()) == []
        # That it is lost is a change as well.
        while not pool.snapshot():
            await asyncio.wait_for(pool.next_change().wait(), _TIMEOUT_S)
        [again] = pool.snapshot()
        assert again is not session
        stream = again.submit(request("b"))
        _, _, client_index = await served.engine.next_command()
        served.deliver(client_index, output("b", 0, FinishReason.LENGTH))
        assert await collect(stream) == [0]
        await pool.close()


async def test_a_change_of_role_keeps_the_session() -> None:
    async with serving() as served:
        pool = SessionPool(member(), timeout_s=60.0)
        members = Membership(1, (served.descriptor,))
        await pool.update(members)
        [before] = pool.snapshot()
        await pool.update(members.with_role("decode-0", 1, EngineRole.PREFILL))
        [after] = pool.snapshot()
        assert after is before
        assert after.descriptor.role is EngineRole.PREFILL
        await pool.close()
