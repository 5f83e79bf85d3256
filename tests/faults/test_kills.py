"""kill -9 of either end of a handoff: the client sees a pause, and every token once."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, LiveEngines

CHUNK_POINTS = [
    pytest.param(Point.AFTER_CHUNK, 2, id="between chunks"),
    pytest.param(Point.INSIDE_CHUNK, 3, id="inside a chunk"),
    pytest.param(Point.AFTER_CHUNK, NUM_CHUNKS, id="after the last chunk"),
]


@pytest.mark.parametrize(
    ("point", "chunk"),
    [
        pytest.param(Point.LISTENING, 1, id="while a link is opened"),
        pytest.param(Point.HEARING_READY, 1, id="before READY"),
        *CHUNK_POINTS,
    ],
)
async def test_a_prefill_engine_that_is_killed_costs_no_token(engines: LiveEngines, point: Point, chunk: int) -> None:
    prefill, decode = await engines.start_pair(is_fresh=point in {Point.LISTENING, Point.DIALLING})
    prefill.arm(Fault(Action.KILL, point, chunk))
    answer = asyncio.create_task(engines.check(engines.ask()))
    await prefill.wait_fired()
    successor = await engines.restart(prefill)
    await answer
    await engines.check_whole(decode, successor)
    await engines.check_handed_over(successor, decode)


@pytest.mark.parametrize(
    ("point", "chunk"),
    [
        pytest.param(Point.DIALLING, 1, id="before a link is opened"),
        pytest.param(Point.SAYING_READY, 1, id="before READY"),
        *CHUNK_POINTS,
    ],
)
async def test_a_decode_engine_that_is_killed_costs_no_token(engines: LiveEngines, point: Point, chunk: int) -> None:
    prefill, decode = await engines.start_pair(is_fresh=point in {Point.LISTENING, Point.DIALLING})
    decode.arm(Fault(Action.KILL, point, chunk))
    answer = asyncio.create_task(engines.check(engines.ask()))
    await decode.wait_fired()
    successor = await engines.restart(decode)
    await answer
    await engines.check_whole(prefill, successor)
    await engines.check_handed_over(prefill, successor)
