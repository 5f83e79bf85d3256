"""The generator in virtual time, so that every time is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.load import LoadResult, Send, offer_load
from cluster.bench.record import RequestRecord
from tests.cluster.bench.virtual_time import VirtualLoop, run_in_virtual_time


class _Sender:
    """Every answer takes so many seconds. busy_s: how long the preparation of a request occupies the event loop"""

    def __init__(self, answer_s: float, busy_s: Sequence[float] = ()) -> None:
        self._answer_s, self._busy_s = answer_s, busy_s
        self.prepared: list[tuple[int, float]] = []

    def prepare(self, request: PlannedRequest) -> Send:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.prepared.append((request.index, loop.time()))
        if request.index < len(self._busy_s):
            loop.pass_time(self._busy_s[request.index])
        return self._send

    async def _send(self, record: RequestRecord) -> None:
        record.sent_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self._answer_s)
        record.note_event(asyncio.get_running_loop().time())


def _plan(*arrivals_s: float) -> list[PlannedRequest]:
    return [PlannedRequest(index, arrival_s, 8, 4) for index, arrival_s in enumerate(arrivals_s)]


def _times(result: LoadResult) -> list[tuple[float, float, float]]:
    """Arrival, time when due, and time of sending of each request."""
    records = sorted(result.records, key=lambda record: record.request.index)
    return [(record.arrival_s, record.due_s, record.sent_s) for record in records]


def test_requests_leave_when_they_arrive_whatever_became_of_earlier_ones() -> None:
    result = run_in_virtual_time(offer_load(_plan(0.5, 0.75, 2.0), _Sender(answer_s=10.0)))
    assert _times(result) == [(0.5, 0.5, 0.5), (0.75, 0.75, 0.75), (2.0, 2.0, 2.0)]
    assert (result.duration_s, result.peak_concurrency) == (12.0, 3)
    assert {record.ttft_s for record in result.records} == {10.0}


def test_a_burst_is_prepared_before_it_begins() -> None:
    sender = _Sender(answer_s=1.0, busy_s=[0.25, 0.25])
    result = run_in_virtual_time(offer_load(_plan(0.0, 0.0), sender))
    assert sender.prepared == [(0, 0.0), (1, 0.25)]
    assert [record.lateness_s for record in result.records] == [0.0, 0.0]
    assert result.duration_s == 1.0


def test_a_limit_on_the_concurrency_holds_requests_back() -> None:
    result = run_in_virtual_time(offer_load(_plan(0.0, 0.0, 0.0, 5.0), _Sender(answer_s=2.0), max_concurrency=2))
    assert _times(result) == [(0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 2.0, 2.0), (5.0, 5.0, 5.0)]
    assert sorted(record.queue_s for record in result.records) == [0.0, 0.0, 0.0, 2.0]
    assert {record.lateness_s for record in result.records} == {0.0}, "the limit is no fault of the generator"
    assert (result.duration_s, result.peak_concurrency) == (7.0, 2)


def test_a_generator_that_was_busy_says_how_late_it_was() -> None:
    result = run_in_virtual_time(offer_load(_plan(0.5, 0.75), _Sender(answer_s=1.0, busy_s=[0.0, 1.0])))
    assert _times(result) == [(0.5, 0.5, 0.5), (0.75, 0.75, 1.5)]
    assert sorted(record.lateness_s for record in result.records) == [0.0, 0.75]
    assert max(result.lag_s) == 0.875, "of the timer that was due 0.125 s after the work had begun"


def test_an_idle_event_loop_has_no_lag() -> None:
    result = run_in_virtual_time(offer_load(_plan(0.0), _Sender(answer_s=1.0625)))
    assert list(result.lag_s) == [0.0] * 8


def test_each_end_is_told() -> None:
    told: list[tuple[int, int]] = []
    run_in_virtual_time(
        offer_load(_plan(0.0, 1.0), _Sender(answer_s=3.0), on_change=lambda sent, ended: told.append((sent, ended)))
    )
    assert told == [(2, 1), (2, 2)]
