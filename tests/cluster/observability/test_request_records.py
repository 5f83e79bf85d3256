"""A request's record is found by its owner and by operators, and by nobody else; and it tells of every attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.access.caller import Caller
from cluster.errors import ClusterError, InvalidRequest
from cluster.observability.metrics import ServingMetrics
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.request_records import (
    MAX_FOUND,
    MAX_FOUND_BYTES,
    MAX_LAST,
    MAX_LAST_BYTES,
    RecordQuery,
    RequestRecords,
)
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.trace_writing.request_tracer import start_tracer
from cluster.parameters.generation import TextPrompt
from cluster.requests.model_versions import ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import LateDecision
from cluster.routing.engine_connection import EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.routing.request_record import EngineQueue, RequestRecord
from cluster.settings.request_recording import RequestTraceConfig
from cluster.traces.request_trace import parse_line
from cluster.vectors.vector_requests import EmbedRequest
from tests.cluster.routing.record_samples import attempt, decision
from tests.cluster.serving_setup import (
    HELLO,
    collect,
    decode_timings,
    make_pair,
    make_serving,
    make_version,
    prefill_timings,
)
from tests.fakes import FakeEngine, FakePool

LENGTH = FinishReason.LENGTH
ANY = RecordQuery("r", None)


class DecidingRouter(LeastLoadedPair):
    """Chooses as its base does, and gives a reason."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        return replace(super().choose(request, engines), reasons=LateDecision(decision))


def found(serving: Serving, query: RecordQuery = ANY) -> list[RequestRecord]:
    return [RequestRecord.from_bytes(data) for data in serving.find_records(query)]


async def test_a_request_that_has_ended_leaves_what_was_decided_and_what_came_true() -> None:
    pair = make_pair()
    answer = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
    pair.decode.send(consumer, 1, "bcd", finish_reason=LENGTH, timings=decode_timings())
    await answer

    (one,) = found(pair.serving)
    assert (one.request_id, one.tenant, one.outcome, one.model_version) == ("r", "", "length", 1)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.max_tokens) == (5, 4, 59)
    # The clock goes on by a second with each reading: at the start, at both outputs, and at the end.
    assert (one.ttft_s, one.itl_p50_s, one.itl_max_s, one.duration_s) == (1.0, 1 / 3, 1 / 3, 3.0)
    (only,) = one.attempts
    assert (only.prefill_engine_id, only.decode_engine_ids, only.num_new_tokens, only.failure) == ("p0", ("d0",), 4, "")
    assert only.prefill is not None
    assert (only.prefill.queued_s, only.prefill.prefill_s, only.prefill.num_cached_tokens) == (0.25, 0.5, 2)
    assert only.first_token_s is not None
    assert 0 <= only.began_s <= only.first_token_s
    assert (one.model, only.moved_s, only.ended_s) == ("tiny", (), None)
    assert only.decode is not None
    assert (only.decode.transfer_s, only.decode.exposed_transfer_s, only.decode.num_transferred_bytes) == (
        0.75,
        0.0625,
        4096,
    )


async def test_a_request_in_flight_has_a_record_without_an_outcome() -> None:
    pair = make_pair()
    answer = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, _ = await pair.next_requests()
    (one,) = found(pair.serving)
    assert (one.outcome, one.duration_s, one.ttft_s, one.attempts[0].num_new_tokens) == (None, None, None, 0)
    assert pair.serving.live_records(1) == [msgspec.structs.replace(one, in_flight_s=None)]
    assert pair.serving.live_records(0) == []
    pair.prefill.send(producer, 0, "a", finish_reason=LENGTH)
    await answer
    (one,) = found(pair.serving)
    assert (one.outcome, one.attempts[0].num_new_tokens) == ("length", 1)


async def test_a_request_in_flight_has_the_queues_of_those_engines_that_have_told_nothing_of_it() -> None:
    pair = make_pair()
    queues = [EngineQueue("p0", num_waiting=2), EngineQueue("d0", num_waiting=1), EngineQueue("d1")]
    pair.serving.records.queues = lambda: {one.engine_id: one for one in queues}
    async with aclosing(pair.serving.generate(HELLO)) as chunks:
        first = asyncio.create_task(anext(chunks))
        producer, consumer = await pair.next_requests()
        assert found(pair.serving)[0].queues == tuple(queues[:2])
        pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
        await first
        assert found(pair.serving)[0].queues == (queues[1],)
        pair.decode.send(consumer, 1, "b", finish_reason=LENGTH, timings=decode_timings())
        async for _ in chunks:
            pass
    assert found(pair.serving)[0].queues == ()


async def test_a_request_whose_engine_died_leaves_both_attempts_with_their_decisions() -> None:
    prefill = FakeEngine("p0", EngineRole.PREFILL)
    first, second = (FakeEngine(f"d{n}", EngineRole.DECODE, num_other_requests=n) for n in range(2))
    pool = FakePool(prefill, first, second)
    serving = make_serving(
        pool=pool,
        recovery_policy=RecoveryPolicy(max_attempts=4, engine_timeout_s=30.0),
        versions=ModelVersions(make_version(1, router=DecidingRouter())),
    )
    answer = asyncio.create_task(collect(serving.generate(HELLO)))
    producer, consumer = await prefill.next_request(), await first.next_request()
    prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    first.send(consumer, 1, "b")
    for _ in range(20):
        await asyncio.sleep(0)
    pool.engines.remove(first)
    first.lose()
    producer, consumer = await prefill.next_request(), await second.next_request()
    prefill.send(producer, 2, "c", end_cause=EndCause.HANDED_OVER)
    second.send(consumer, 3, "d", finish_reason=LENGTH)
    await answer

    (one,) = found(serving)
    assert [(each.decode_engine_ids, each.num_new_tokens) for each in one.attempts] == [(("d0",), 2), (("d1",), 2)]
    assert "engine d0 is lost" in one.attempts[0].failure
    assert one.attempts[1].failure == ""
    began_s, token_s, ended_s = one.attempts[0].began_s, one.attempts[0].first_token_s, one.attempts[0].ended_s
    assert token_s is not None
    assert ended_s is not None
    assert began_s <= token_s <= ended_s <= one.attempts[1].began_s
    assert [each.decision for each in one.attempts] == [decision(), decision()]
    assert serving.records.summary().requests_by_way == {"prefill_decode": 1}


async def test_a_request_that_failed_or_was_left_leaves_its_record_too() -> None:
    pair = make_pair()
    answer = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    await pair.next_requests()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    (one,) = found(pair.serving)
    assert (one.outcome, one.num_output_tokens) == ("cancelled", 0)


async def test_a_request_that_no_engine_got_leaves_no_record() -> None:
    serving = make_serving()
    await asyncio.gather(collect(serving.generate(HELLO)), return_exceptions=True)
    assert found(serving) == []
    assert serving.records.summary().num_requests == 0


async def test_a_tenants_request_is_found_by_its_tenant_and_by_those_who_may_see_all() -> None:
    pair = make_pair()
    answer = asyncio.create_task(collect(pair.serving.generate(replace(HELLO, caller=Caller(tenant="a")))))
    producer, _ = await pair.next_requests()
    for _ in ("in flight", "ended"):
        assert [one.tenant for one in found(pair.serving, RecordQuery("r", "a"))] == ["a"]
        assert [one.tenant for one in found(pair.serving, RecordQuery("r", None))] == ["a"]
        assert found(pair.serving, RecordQuery("r", "b")) == []
        assert found(pair.serving, RecordQuery("other", "a")) == []
        pair.prefill.send(producer, 0, "a", finish_reason=LENGTH)
        await asyncio.gather(answer)


def records(*requests: tuple[str, str], num_attempts: int = 1) -> tuple[RequestRecords, list[RecordWriter]]:
    writers = []
    for tenant, request_id in requests:
        writer = RecordWriter(request_id, tenant, arrived_at_s=0.0, now_s=0.0)
        for _ in range(num_attempts):
            writer.begin(attempt, 1.0)
        writers.append(writer)
    return RequestRecords("i", RecordStore(1000, 1 << 24), clock=lambda: 0.0), writers


def list_files(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def stopwatch() -> Stopwatch:
    return Stopwatch(lambda: 0.0, ServingMetrics())


def ids_of(data: list[bytes]) -> list[str]:
    return [RequestRecord.from_bytes(one).request_id for one in data]


def test_the_samples_of_a_request_are_found_by_the_id_of_the_call() -> None:
    ids = ["r.0.0", "r.0.1", "r.x.1", "r.1", "r.0.1.2", "other.0.0", "rr.0.0"]
    one, writers = records(*(("", name) for name in ids))
    for writer in writers[:-1]:
        with one.kept(writer, stopwatch()):
            pass
    assert ids_of(one.find(ANY, [])) == ["r.0.0", "r.0.1"]
    assert ids_of(one.find(RecordQuery("r.0.1", ""), [])) == ["r.0.1"]
    assert ids_of(one.find(RecordQuery("rr", ""), [(writers[-1], stopwatch())])) == ["rr.0.0"]


def test_the_last_requests_are_those_in_flight_and_then_those_that_ended_last() -> None:
    one, writers = records(*(("a" if number % 2 else "b", f"r-{number}") for number in range(6)))
    for writer in writers[:4]:
        with one.kept(writer, stopwatch()):
            pass
    live = [(writer, stopwatch()) for writer in writers[4:]]
    assert ids_of(one.find(RecordQuery("", None, last=4), live)) == ["r-5", "r-4", "r-3", "r-2"]
    assert ids_of(one.find(RecordQuery("", "a", last=10), live)) == ["r-5", "r-3", "r-1"]
    assert one.find(RecordQuery("", "c", last=10), live) == []


def test_of_the_requests_in_flight_no_more_are_described_than_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    one, writers = records(*(("a" if number % 2 else "b", f"r-{number}") for number in range(1000)))
    described: list[str] = []
    describe = RecordWriter.record

    def count(writer: RecordWriter, ingress: str, watch: Stopwatch) -> RequestRecord:
        described.append(writer.request_id)
        return describe(writer, ingress, watch)

    monkeypatch.setattr(RecordWriter, "record", count)
    assert ids_of(one.find(RecordQuery("", "a", last=2), [(writer, stopwatch()) for writer in writers])) == [
        "r-999",
        "r-997",
    ]
    assert described == ["r-999", "r-997"]


def test_the_last_requests_are_bounded_in_number_and_in_bytes() -> None:
    one, writers = records(*(("", f"r-{number}") for number in range(MAX_LAST + 5)))
    live = [(writer, stopwatch()) for writer in writers]
    assert len(one.find(RecordQuery("", None, last=10**9), live)) == MAX_LAST
    one, writers = records(*(("", f"r-{number}") for number in range(200)), num_attempts=16)
    data = one.find(RecordQuery("", None, last=200), [(writer, stopwatch()) for writer in writers])
    assert MAX_LAST_BYTES // 2 < sum(map(len, data)) <= MAX_LAST_BYTES
    assert len(data) < 200


def test_each_record_is_new_once_to_who_asks_since_when() -> None:
    one, writers = records(*(("", f"r-{number}") for number in range(5)))
    assert one.since(0, 10) == (0, [])
    seen, number = [], 0
    for writer in writers:
        with one.kept(writer, stopwatch()):
            pass
        number, new = one.since(number, 10)
        seen += [record.request_id for record in new]
    assert seen == [f"r-{number}" for number in range(5)]
    assert one.since(number, 10) == (number, [])
    newest, last_two = one.since(0, 2)
    assert (newest, [record.request_id for record in last_two]) == (number, ["r-3", "r-4"])


def test_an_answer_is_bounded_in_number_and_in_bytes() -> None:
    one, writers = records(*(("", f"r.0.{number}") for number in range(100)))
    live = [(writer, stopwatch()) for writer in writers]
    assert len(one.find(ANY, live)) == MAX_FOUND
    one, writers = records(*(("", f"r.0.{number}") for number in range(100)), num_attempts=16)
    data = one.find(ANY, [(writer, stopwatch()) for writer in writers])
    assert 0 < sum(map(len, data)) <= MAX_FOUND_BYTES
    assert len(data) < MAX_FOUND


def test_an_id_in_flight_hides_the_record_of_an_earlier_request() -> None:
    one, (earlier, later) = records(("", "r"), ("", "r"))
    with one.kept(earlier, stopwatch()):
        pass
    later.begin(attempt, 2.0)
    (data,) = one.find(ANY, [(later, stopwatch())])
    assert len(RequestRecord.from_bytes(data).attempts) == 2


async def test_every_request_for_tokens_has_a_line_in_the_request_trace_and_none_for_vectors(tmp_path: Path) -> None:
    settings = RequestTraceConfig(directory=tmp_path)
    now_s = asyncio.get_running_loop().time()
    tracer = start_tracer(settings, "ingress-0", PUBLIC_KEY, now_s=1.7e9, monotonic_s=now_s)
    pair = make_pair()
    pair.serving.records = RequestRecords("ingress-0", RecordStore(0, 1 << 20), tracer=tracer)
    answer = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
    pair.decode.send(consumer, 1, "bcd", finish_reason=LENGTH, timings=decode_timings())
    await answer
    with pytest.raises(InvalidRequest):
        await collect(pair.serving.generate(replace(HELLO, request_id="long", prompt=TextPrompt("x" * 10_000))))
    with pytest.raises(ClusterError):
        await pair.serving.embed(EmbedRequest(request_id="vector", inputs=[TextPrompt("x")]))
    await asyncio.to_thread(tracer.close, 30)

    (file,) = list_files(tmp_path)
    served, refused = map(parse_line, file.splitlines()[1:])
    assert (served.outcome, served.way, served.num_output_tokens) == ("length", "prefill_decode", 4)
    assert (served.prefill_engine, served.decode_engines) == (
        pair.prefill.descriptor.engine_id,
        (pair.decode.descriptor.engine_id,),
    )
    assert len(served.block_hashes) == 1
    assert 0 <= served.arrival_s < 60
    assert (refused.request_id, refused.outcome, refused.num_prompt_tokens) == ("long", "invalid", None)


def test_without_records_the_figures_are_summed_up_all_the_same() -> None:
    one = RequestRecords("i", RecordStore(0, 1 << 20), clock=lambda: 0.0)
    _, (writer,) = records(("", "r"))
    with one.kept(writer, stopwatch()):
        pass
    assert one.is_off
    assert one.find(ANY, [(writer, stopwatch())]) == []
    assert one.summary().num_requests == 1
