"""A model that gives no tokens is proven by its vectors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from actors.config import ModelFacts
from actors.core.request import FinishReason
from actors.pooling_facts import PoolingFacts
from cluster.engine_connection import EngineRole
from cluster.errors import CanaryFailed
from cluster.pool.canary import run_canary
from kv_transfer.layout import KVCacheLayout
from tests.fakes import FakeEngine

LAYOUT = KVCacheLayout(8, 1, 1, 16, 4, "float32", 4, "fingerprint")
FACTS = ModelFacts(64, 257, (), LAYOUT, generates=False, pooling=PoolingFacts(embedding_size=2, pooling="mean"))


async def answer(engine: FakeEngine, vector: list[float] | None, error: str | None = None) -> None:
    request = await engine.next_request()
    assert request.pooling_params is not None
    reason = FinishReason.ERROR if vector is None else FinishReason.STOP
    engine.send(request, 0, [], finish_reason=reason, pooling_output=vector, error=error)


async def prove(prefill: list[float] | None, decode: list[float]) -> None:
    engines = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
    async with asyncio.TaskGroup() as tasks:
        answering = [
            tasks.create_task(answer(engines[0], prefill, "no room")),
            tasks.create_task(answer(engines[1], decode)),
        ]
        try:
            await run_canary(*engines, FACTS, timeout_s=10)
        finally:
            for task in answering:
                task.cancel()


async def test_both_engines_of_a_pair_have_to_give_the_same_vector() -> None:
    await prove([0.6, 0.8], [0.6, 0.79])
    with pytest.raises(ExceptionGroup) as raised:
        await prove([0.6, 0.8], [0.8, 0.6])
    assert raised.group_contains(CanaryFailed, match="p0 -> d0: the two engines do not compute the same vector")


@pytest.mark.parametrize("vector", [[0.0, 0.0], [float("nan"), 1.0]])
async def test_a_vector_without_a_length_proves_nothing(vector: list[float]) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await prove(vector, vector)
    assert raised.group_contains(CanaryFailed, match="a vector of length")


async def test_an_engine_that_refuses_is_named() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await prove(None, [0.6, 0.8])
    assert raised.group_contains(CanaryFailed, match="p0 gave the canary request up: no room")


async def test_one_engine_alone_and_a_classifier() -> None:
    engine = FakeEngine("b0", EngineRole.BOTH)
    facts = replace(FACTS, pooling=PoolingFacts(labels=("a", "b")))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer(engine, [1.5, -3.0]))
        await run_canary(None, engine, facts, timeout_s=10)
    [request] = engine.submitted
    assert request.pooling_params is not None
    assert (request.pooling_params.task, request.pooling_params.activate) == ("classify", False)
