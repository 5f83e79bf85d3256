"""The writer collects a request's attempts, and forgets no first one and no last one."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import msgspec
import pytest

from actors.core.requests.request import FinishReason
from actors.core.requests.slo import Slo
from cluster.observability.metrics import ServingMetrics
from cluster.observability.record_writer import Describe, RecordWriter
from cluster.observability.stopwatch import Stopwatch
from cluster.parameters.generation import EngineReport, GenerateEnd, GenerateTimings, Usage
from cluster.routing.request_record import AttemptRecord
from tests.cluster.routing.record_samples import attempt


def describe(num_new_tokens: list[int]) -> Describe:
    """An attempt whose number of tokens is the list's last one."""

    def now(began_s: float) -> AttemptRecord:
        return msgspec.structs.replace(attempt(began_s), num_new_tokens=num_new_tokens[-1])

    return now


def stopwatch() -> Stopwatch:
    return Stopwatch(lambda: 5.0, ServingMetrics())


def writer() -> RecordWriter:
    return RecordWriter("r", "t", arrived_at_s=1000.0, now_s=10.0)


def test_an_attempt_is_described_as_it_is_when_the_record_is_written() -> None:
    one, tokens = writer(), [0]
    one.begin(describe(tokens), now_s=10.5)
    tokens.append(7)
    written = one.record("ingress-3", stopwatch())
    assert (written.request_id, written.tenant, written.ingress, written.arrived_at_s) == ("r", "t", "ingress-3", 1000)
    assert [(which.began_s, which.num_new_tokens) for which in written.attempts] == [(0.5, 7)]
    assert written.outcome is None


def test_a_failed_attempt_stays_as_it_was_with_its_reason() -> None:
    one, tokens = writer(), [3]
    one.begin(describe(tokens), now_s=10.0)
    one.fail("engine d0 is lost", now_s=10.75)
    tokens.append(9)
    one.begin(describe([1]), now_s=11.0)
    assert [
        (which.began_s, which.num_new_tokens, which.failure, which.ended_s)
        for which in one.record("i", stopwatch()).attempts
    ] == [(0.0, 3, "engine d0 is lost", 0.75), (1.0, 1, "", None)]


@pytest.mark.parametrize(
    ("slo", "finish_reason", "has_met"),
    [
        pytest.param(None, FinishReason.STOP, None, id="no aims"),
        pytest.param(Slo(), FinishReason.STOP, None, id="empty aims"),
        pytest.param(Slo(ttft_s=1.0, itl_s=0.5), FinishReason.LENGTH, True, id="equal to the aims"),
        pytest.param(Slo(ttft_s=0.9), FinishReason.STOP, False, id="a late first token"),
        pytest.param(Slo(itl_s=0.4), FinishReason.STOP, False, id="slow tokens"),
        pytest.param(Slo(ttft_s=1.0), FinishReason.ERROR, False, id="it failed"),
        pytest.param(Slo(ttft_s=1.0), None, None, id="the client has left"),
    ],
)
def test_a_request_meets_its_aims_or_not(
    slo: Slo | None, finish_reason: FinishReason | None, has_met: bool | None
) -> None:
    timings = GenerateTimings(1.0, 0.5, None, EngineReport("d0", None))
    times = iter([10.0, 10.5, 11.0, 11.5, 12.0, 12.5])
    watch, one = Stopwatch(lambda: next(times), ServingMetrics()), writer()
    one.slo = slo
    in_flight = one.record("i", watch)
    assert (in_flight.has_met_aims, in_flight.in_flight_s, in_flight.duration_s) == (None, 0.5, None)
    with pytest.raises(asyncio.CancelledError) if finish_reason is None else nullcontext(), watch.counting_the_end():
        for _ in range(3):
            watch.count(1)
        if finish_reason is None:
            raise asyncio.CancelledError
        watch.end(GenerateEnd(finish_reason, None, Usage(1, 3, 0), timings))
    written = one.record("i", watch)
    assert written.has_met_aims is has_met
    assert (written.in_flight_s, written.duration_s) == (None, 2.5)
    assert (written.ttft_aim_s, written.itl_aim_s) == ((slo.ttft_s, slo.itl_s) if slo else (None, None))


def test_a_long_reason_is_cut() -> None:
    one = writer()
    one.begin(describe([0]), now_s=10.0)
    one.fail("x" * 10_000, now_s=11.0)
    assert one.record("i", stopwatch()).attempts[0].failure == "x" * 300


def test_of_very_many_attempts_the_first_and_the_last_ones_are_kept() -> None:
    one = writer()
    for number in range(100):
        one.begin(describe([number]), now_s=10.0 + number)
        one.fail("again", now_s=10.5 + number)
    written = one.record("i", stopwatch())
    assert [which.num_new_tokens for which in written.attempts] == [0, *range(85, 100)]
    assert written.num_attempts_left_out == 84


def test_a_request_that_no_engine_got_has_nothing_to_record() -> None:
    assert not writer().has_attempts


def test_a_request_that_an_engine_gets_or_got_has_something_to_record() -> None:
    running, failed = writer(), writer()
    for one in (running, failed):
        one.begin(describe([0]), now_s=10.0)
    failed.fail("lost", now_s=11.0)
    assert running.has_attempts
    assert failed.has_attempts
