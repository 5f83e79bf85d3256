"""Prompts of one call that are ready at once do not keep everybody else waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.parameters.generation import GenerateRequest, TextPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersions
from cluster.requests.samples import GenerateManyRequest
from cluster.requests.turns import Turns
from cluster.routing.base import EngineT, Route
from cluster.routing.engine_connection import EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from tests.cluster.serving_setup import make_serving, make_version
from tests.fakes import FakeEngine

NUM_PROMPTS = 12


class Passes:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._count)

    def stop(self) -> None:
        self._handle.cancel()


async def test_each_turn_is_in_a_pass_of_its_own() -> None:
    turns, passes = Turns(), Passes()
    seen: list[int] = []

    async def work() -> None:
        await turns.next()
        seen.append(passes.number)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(work())
    passes.stop()
    assert len(set(seen)) == 20


async def test_one_that_leaves_while_it_waits_keeps_nobody_out() -> None:
    turns = Turns()
    first, second, third = (asyncio.create_task(turns.next()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(first, third)


class PassNotingRouter(LeastLoadedPair):
    """Notes in which pass of the event loop it was asked, and told of an end."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.asked: list[int] = []
        self.told: list[int] = []

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        self.asked.append(self._passes.number)
        return super().choose(request, engines)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        self.told.append(self._passes.number)


async def test_the_prompts_of_one_call_are_routed_and_ended_in_passes_of_their_own() -> None:
    passes = Passes()
    router = PassNotingRouter(passes)
    engine = FakeEngine("b0", EngineRole.BOTH)
    serving = make_serving(engine, versions=ModelVersions(make_version(1, router=router)))
    each = GenerateRequest(prompt=None, request_id="r", sampling=SamplingOptions(max_tokens=1))
    request = GenerateManyRequest(prompts=[TextPrompt("hello")] * NUM_PROMPTS, n=1, best_of=None, each=each)

    async def ask() -> int:
        return len([chunk async for chunk in serving.generate_many(request) if chunk.chunk.end is not None])

    async with asyncio.timeout(60):
        asking = asyncio.create_task(ask())
        for engine_request in [await engine.next_request() for _ in range(NUM_PROMPTS)]:
            engine.send(engine_request, 0, "a", finish_reason=FinishReason.LENGTH)
        assert await asking == NUM_PROMPTS
    passes.stop()
    assert len(set(router.asked)) == NUM_PROMPTS
    assert len(set(router.told)) == NUM_PROMPTS
