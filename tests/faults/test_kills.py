"""kill -9 of either end of a handoff: the client sees a pause, and every token once."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import EngineFailed
from cluster.routing.engine_connection import EngineRole
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, NUM_PROMPT_TOKENS, LiveEngines

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


async def test_a_decode_engine_that_is_killed_disturbs_nobody_elses_transfers(engines: LiveEngines) -> None:
    prefill, killed = await engines.start_pair()
    sound = await engines.start("decode-1", EngineRole.DECODE)
    killed.arm(Fault(Action.KILL, Point.INSIDE_CHUNK, 3))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(engines.check_pair(engines.ask(), prefill, sound))
        with pytest.raises(EngineFailed):
            await engines.check_pair(engines.ask(), prefill, killed)
    await engines.check_whole(prefill, sound)
    assert (sound.count("num_links_lost"), sound.count("num_prompt_tokens_computed")) == (0, 0)


async def test_a_prefill_engine_that_is_killed_leaves_those_of_another_alone(engines: LiveEngines) -> None:
    killed, decode = await engines.start_pair()
    sound = await engines.start("prefill-1", EngineRole.PREFILL)
    killed.arm(Fault(Action.KILL, Point.INSIDE_CHUNK, 3))
    questions = [engines.ask() for _ in range(3)]
    async with asyncio.TaskGroup() as tasks:
        for question in questions:
            tasks.create_task(engines.check_pair(question, sound, decode))
        await engines.check_pair(engines.ask(), killed, decode)
    await engines.check_whole(sound, decode)
    assert decode.count("num_links_lost") == 1
    assert decode.count("num_prompt_tokens_computed") <= NUM_PROMPT_TOKENS, "more than the killed one's request"
