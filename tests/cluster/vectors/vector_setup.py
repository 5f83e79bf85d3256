"""Serving on fake engines, for a model that gives vectors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.requests.model_versions import ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.base import Router
from tests.cluster.serving_setup import MODEL, make_serving, make_version, prefill_timings
from tests.fakes import FakeEngine, FakePool

EMBEDS = PoolingFacts(embedding_size=2, pooling="mean")
CLASSIFIES = PoolingFacts(labels=("bad", "good"), activation="softmax")
SCORES = PoolingFacts(labels=("relevance",), activation="sigmoid")
RETRIES = RecoveryPolicy(max_attempts=4, engine_timeout_s=10)


def serving_of(
    *engines: FakeEngine,
    facts: PoolingFacts | None = EMBEDS,
    num_versions: int = 1,
    pool: FakePool | None = None,
    max_requests_in_flight: int = 100,
    router: Router | None = None,
) -> Serving:
    model = replace(MODEL, pooling=facts)
    return make_serving(
        *engines,
        versions=ModelVersions(*(make_version(number, model, router) for number in range(1, num_versions + 1))),
        recovery_policy=RETRIES,
        pool=pool,
        max_requests_in_flight=max_requests_in_flight,
    )


async def answer(engine: FakeEngine, vector: list[float] | None = None) -> EngineCoreRequest:
    """Take the engine's next request and give it a vector: the number of its tokens, and 0."""
    request = await engine.next_request()
    values = [float(len(request.prompt_token_ids)), 0.0] if vector is None else vector
    engine.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=values, timings=prefill_timings())
    return request


async def answer_all(engine: FakeEngine) -> None:
    while True:
        await answer(engine)


class Answering:
    """Inside, an engine answers everything."""

    def __init__(self, *engines: FakeEngine) -> None:
        self._engines = engines

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(answer_all(engine)) for engine in self._engines]

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
