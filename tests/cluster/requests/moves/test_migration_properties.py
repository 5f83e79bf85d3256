"""A request moves between two engines: its client gets every token once and nothing is left, whatever they send."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineFailed
from cluster.parameters.generation import GenerateChunk
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import HELLO, make_serving
from tests.fakes import FakeEngine, FakePool

OUTPUT = b"abcdefghij"
FREE = SchedulerStats(num_blocks=100, block_size=16, num_free_blocks=100)
LONG = Preemption(num_computed_tokens=6, num_wait_steps=100)
_MAX_TURNS = 200
_NUM_ENGINES = 4


@dataclass
class Story:
    """Engines that each say OUTPUT, from where they were asked to go on."""

    engines: list[FakeEngine]
    pool: FakePool
    received: list[GenerateChunk] = field(default_factory=list)
    asked: list[tuple[FakeEngine, EngineCoreRequest]] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    num_dead: int = 0
    num_migrations: int = 0
    failure: BaseException | None = None

    async def settle(self) -> None:
        """Let what was said be heard."""
        for _ in range(10):
            await asyncio.sleep(0)

    def open_requests(self) -> list[tuple[FakeEngine, EngineCoreRequest]]:
        """Return what engines work on, the first one first."""
        for engine in self.engines:
            for request in engine.submitted:
                if request.request_id not in self.positions:
                    self.positions[request.request_id] = len(request.output_token_ids)
                    self.asked.append((engine, request))
        return [(engine, request) for engine, request in self.asked if engine.has(request)]

    def tell(self, word: str, engine: FakeEngine, request: EngineCoreRequest) -> None:
        position = self.positions[request.request_id]
        if word == "preempt":
            engine.preempt(request, position, LONG)
        elif word == "refuse" and len(self.open_requests()) > 1 and request.attempt:
            engine.send(request, position, "", finish_reason=FinishReason.ERROR, error="no room")
        elif word == "die" and self.num_dead < 1:
            self.num_dead += 1
            self.pool.engines.remove(engine)
            engine.lose()
        else:
            is_last = position + 1 == len(OUTPUT)
            self.positions[request.request_id] += 1
            reason = FinishReason.LENGTH if is_last else None
            engine.send(request, position, OUTPUT[position : position + 1], finish_reason=reason)


async def tell_story(turns: list[tuple[str, int, bool]], *, leaves: bool) -> Story:
    """turns: after the request has begun to move; what is said, by which of those that have it, if it is heard at once.

    leaves: whether the client leaves after them
    """
    engines = [FakeEngine(f"b{number}", EngineRole.BOTH) for number in range(_NUM_ENGINES)]
    story = Story(engines, FakePool(*engines))
    planner = MigrationPlanner(lambda: {engine.descriptor.key: (FREE, 1000.0) for engine in engines}, lambda: 1000.0)
    serving = make_serving(
        pool=story.pool,
        recovery_policy=RecoveryPolicy(max_attempts=4, engine_timeout_s=30.0),
        migration_planner=planner,
    )

    async def read() -> None:
        async with aclosing(serving.generate(HELLO)) as chunks:
            async for chunk in chunks:
                story.received.append(chunk)

    reading = asyncio.create_task(read())
    await story.settle()
    for word, which, is_heard in [("token", 0, True), ("preempt", 0, True), *turns]:
        if requests := story.open_requests():
            story.tell(word, *requests[which % len(requests)])
        if is_heard:
            await story.settle()
    if leaves:
        reading.cancel()
    for _ in range(_MAX_TURNS):
        await story.settle()
        if reading.done():
            break
        for engine, request in story.open_requests():
            story.tell("token", engine, request)
    assert reading.done(), "it hangs"
    [story.failure] = await asyncio.gather(reading, return_exceptions=True)
    story.num_migrations = serving.num_migrations
    assert serving.num_requests_in_flight == 0
    return story


WORDS = ["token"] * 3 + ["preempt"] * 3 + ["refuse", "die"]
TURNS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 1), st.booleans()), max_size=20)


@settings(deadline=None)
@given(turns=TURNS, leaves=st.booleans())
def test_every_token_comes_once_and_nothing_is_left(turns: list[tuple[str, int, bool]], leaves: bool) -> None:
    story = asyncio.run(tell_story(turns, leaves=leaves))
    tokens = [(chunk.first_position, token_id) for chunk in story.received for token_id in chunk.token_ids]
    assert tokens == list(enumerate(OUTPUT))[: len(tokens)]
    assert not [engine for engine in story.engines if engine.num_unfinished_requests]
    if story.failure is None:
        assert leaves or len(tokens) == len(OUTPUT)
    elif not leaves:
        # One engine's death ends nothing; but both that had it may have given it up.
        assert isinstance(story.failure, EngineFailed)
        assert "no room" in str(story.failure)
    event(f"{story.num_migrations} migrations, {story.num_dead} deaths, {type(story.failure).__name__}")
