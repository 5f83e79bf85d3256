"""SIGSTOP for longer than any deadline, then SIGCONT: who wakes late touches nothing that others have by then."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, SMALL_POOL, TRANSFER, LiveEngines

STOPPED_FOR_LONG = TRANSFER.model_copy(
    update={"connect_timeout_s": 0.5, "ready_timeout_s": 0.5, "handoff_timeout_s": 0.5, "chunk_timeout_s": 0.25}
)
"""Deadlines that each test outwaits. On a busy machine they may pass without any fault: tokens are right even then."""
CHUNK_POINTS = [
    pytest.param(Point.AFTER_CHUNK, 2, id="between chunks"),
    pytest.param(Point.INSIDE_CHUNK, 3, id="inside a chunk"),
    pytest.param(Point.AFTER_CHUNK, NUM_CHUNKS, id="after the last chunk"),
]


@pytest.mark.parametrize(("point", "chunk"), [pytest.param(Point.HEARING_READY, 1, id="before READY"), *CHUNK_POINTS])
async def test_a_producer_that_wakes_late_writes_into_no_block(engines: LiveEngines, point: Point, chunk: int) -> None:
    prefill, decode = await engines.start_pair(num_blocks=SMALL_POOL, transfer=STOPPED_FOR_LONG)
    answer = await engines.ask_until_fired(Fault(Action.STOP, point, chunk), prefill, prefill, decode)
    await decode.wait_until_whole()
    async with engines.others_in_all_blocks(decode):
        prefill.signal(signal.SIGCONT)
    await answer
    await engines.check_whole(prefill, decode)
    await engines.check_pair(engines.ask(), prefill, decode)


@pytest.mark.parametrize(("point", "chunk"), [pytest.param(Point.SAYING_READY, 1, id="before READY"), *CHUNK_POINTS])
async def test_a_consumer_that_wakes_late_takes_nothing_from_reused_blocks(
    engines: LiveEngines, point: Point, chunk: int
) -> None:
    prefill, decode = await engines.start_pair(num_blocks=SMALL_POOL, transfer=STOPPED_FOR_LONG)
    answer = await engines.ask_until_fired(Fault(Action.STOP, point, chunk), decode, prefill, decode)
    await prefill.wait_until_whole()
    async with engines.others_in_all_blocks(prefill):
        decode.signal(signal.SIGCONT)
    await answer
    await engines.check_whole(prefill, decode)
    await engines.check_pair(engines.ask(), prefill, decode)


async def test_blocks_that_a_slow_consumer_has_still_to_read_are_not_reused(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair(num_blocks=SMALL_POOL)
    decode.arm(Fault(Action.STOP, Point.INSIDE_CHUNK, 3))
    answer = asyncio.create_task(engines.check_pair(engines.ask(), prefill, decode))
    await decode.wait_fired()
    async with asyncio.TaskGroup() as others:
        for _ in range(2):
            # Side by side these two would take nearly the whole pool.
            others.create_task(engines.check_pair(engines.ask(num_tokens=32), None, prefill))
    decode.signal(signal.SIGCONT)
    await answer
    await engines.check_whole(prefill, decode)
    assert (decode.count("num_prompt_tokens_computed"), decode.count("num_links_lost")) == (0, 0)
