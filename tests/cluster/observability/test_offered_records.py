"""An ingress notes its requests for the planner: all that came, those that it refused, those that ended.

Tests of cluster/observability/request_records.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.errors import AllowanceSpent, InvalidRequest, Overloaded
from cluster.observability.metrics import ServingMetrics
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.request_records import RequestRecords
from cluster.observability.stopwatch import Stopwatch
from cluster.planning.offered_load import LoadWindow, OfferedLoad, merged
from cluster.requests.serving import Serving
from tests.cluster.serving_setup import HELLO, collect, decode_timings, make_pair, prefill_timings


def _watched(serving: Serving) -> OfferedLoad:
    serving.records.offered = OfferedLoad(30.0, now_s=time.time() - 60)
    return serving.records.offered


def _whole(load: OfferedLoad) -> LoadWindow:
    """Return all windows as one."""
    return merged(load.since(0, time.time() + 60))


async def test_a_request_counts_when_it_comes_and_when_it_has_ended() -> None:
    pair = make_pair()
    load = _watched(pair.serving)
    answer = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()
    begun = _whole(load)
    assert (begun.num_offered, begun.num_sized, begun.num_prompt_tokens, begun.num_ended) == (1, 1, 5, 0)
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
    pair.decode.send(consumer, 1, "bcd", finish_reason=FinishReason.LENGTH, timings=decode_timings())
    await answer
    ended = _whole(load)
    assert (ended.num_offered, ended.num_refused, ended.num_ended) == (1, 0, 1)
    [request] = ended.sample
    assert (request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens) == (5, 2, 4)


async def test_a_refused_request_is_offered_load() -> None:
    pair = make_pair(max_requests_in_flight=0)
    load = _watched(pair.serving)
    with pytest.raises(Overloaded):
        await collect(pair.serving.generate(HELLO))
    whole = _whole(load)
    assert (whole.num_offered, whole.num_refused, whole.num_sized, whole.num_ended) == (1, 1, 0, 0)


async def test_an_invalid_request_is_no_load() -> None:
    pair = make_pair()
    load = _watched(pair.serving)
    sampling = replace(HELLO.sampling, temperature=-1.0)
    with pytest.raises(InvalidRequest):
        await collect(pair.serving.generate(replace(HELLO, sampling=sampling)))
    assert _whole(load).num_offered == 0


def test_a_client_at_its_own_limit_is_no_load_and_a_request_that_is_refused_late_counts_once() -> None:
    load = OfferedLoad(30.0, now_s=0.0)
    records = RequestRecords("i", RecordStore(10, 1 << 20), lambda: 0.0, offered=load, wall_clock=lambda: 45.0)
    writer = RecordWriter("r", "", arrived_at_s=45.0, now_s=0.0)
    watch = Stopwatch(lambda: 0.0, ServingMetrics())
    with pytest.raises(AllowanceSpent), records.kept(writer, watch):
        raise AllowanceSpent("a", "requests", 1.0)
    with pytest.raises(Overloaded), records.kept(writer, watch):
        _refuse_late(records, writer)
    [window] = load.since(0, 60.0)
    assert window == LoadWindow(1, num_offered=1, num_refused=1, num_sized=1, num_prompt_tokens=100)


def _refuse_late(records: RequestRecords, writer: RecordWriter) -> None:
    records.size(writer, 100)
    records.size(writer, 100)  # it starts over on another version of the model
    raise Overloaded("full", 1.0)
