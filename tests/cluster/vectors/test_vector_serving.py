"""Serving.embed() and its like on fake engines: who is asked, what is retried, what is left behind.

Tests of cluster/requests/vector_computing.py, cluster/vectors/vector_engines.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import PoolingParams
from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.access.caller import Caller
from cluster.errors import (
    AllowanceSpent,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NoEngineAvailable,
    Overloaded,
)
from cluster.parameters.generation import TextPrompt, TokenPrompt, Usage
from cluster.requests.vector_computing import MAX_PROMPTS_AT_ONCE
from cluster.routing.engine_connection import EngineRole
from cluster.vectors.vector_requests import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    ScoreRequest,
    ScoreResult,
)
from tests.cluster.access.test_allowance import Clock
from tests.cluster.loop_time import let_pass
from tests.cluster.serving_setup import RecordingRouter
from tests.cluster.vectors.vector_setup import CLASSIFIES, SCORES, Answering, answer, serving_of
from tests.fakes import FakeEngine, FakePool

HELLO = EmbedRequest(request_id="r", inputs=[TextPrompt("hello")])


def prefill_engine(number: int = 0, model_version: int = 1) -> FakeEngine:
    return FakeEngine(f"p{number}", EngineRole.PREFILL, model_version)


async def test_prefill_engines_give_the_vectors_of_all_inputs_in_order() -> None:
    prefill, decode = prefill_engine(), FakeEngine("d0", EngineRole.DECODE)
    serving = serving_of(prefill, decode)
    request = EmbedRequest(
        inputs=[TextPrompt("hello"), TokenPrompt([1, 2, 3])], pooling="cls", normalize=False, dimensions=1
    )
    async with Answering(prefill):
        result = await serving.embed(request)
    assert result == EmbedResult([[5.0, 0.0], [3.0, 0.0]], Usage(8, 0, 4), model_version=1)
    params = PoolingParams(pooling="cls", normalize=False, dimensions=1)
    assert [(one.pooling_params, one.kv_transfer_params) for one in prefill.submitted] == [(params, None)] * 2
    assert decode.submitted == []
    assert serving.num_requests_in_flight == prefill.num_unfinished_requests == 0


async def test_the_router_is_told_where_a_prompt_is_computed() -> None:
    prefill, router = prefill_engine(), RecordingRouter()
    async with Answering(prefill):
        await serving_of(prefill, router=router).embed(HELLO)
    assert router.told == [("start", "p0")]


async def test_an_engine_that_does_both_is_asked_where_there_is_no_other_and_a_decode_engine_never() -> None:
    both, decode = FakeEngine("b0", EngineRole.BOTH), FakeEngine("d0", EngineRole.DECODE)
    async with Answering(both):
        await serving_of(both, decode).embed(HELLO)
    assert len(both.submitted) == 1
    with pytest.raises(NoEngineAvailable, match="no engine computes prompts"):
        await serving_of(decode).embed(HELLO)
    prefill = prefill_engine()
    async with Answering(prefill):
        await serving_of(both, prefill).embed(HELLO)
    assert (len(both.submitted), len(prefill.submitted)) == (1, 1)


async def test_what_a_dead_engine_had_is_computed_by_another() -> None:
    engines = prefill_engine(0), prefill_engine(1)
    engines[1].num_other_requests = 1
    embedding = asyncio.create_task(serving_of(*engines).embed(HELLO))
    first = await engines[0].next_request()
    engines[0].preempt(first, 0, Preemption(3, 1))
    engines[0].lose()
    # It stays in the pool of the test, and has nothing to do: it is chosen again.
    second = await answer(engines[0])
    assert (await embedding).embeddings == [[5.0, 0.0]]
    assert second == replace(first, request_id=f"{first.request_id}+1", attempt=1)


async def test_a_prompt_waits_for_an_engine_when_its_only_one_has_died() -> None:
    engine, pool = prefill_engine(0), FakePool()
    pool.engines = [engine, FakeEngine("d0", EngineRole.DECODE)]
    embedding = asyncio.create_task(serving_of(pool=pool).embed(HELLO))
    await engine.next_request()
    pool.engines = [FakeEngine("d0", EngineRole.DECODE)]
    engine.lose()
    await asyncio.wait_for(pool.is_watched.wait(), 60)
    new = prefill_engine(1)
    pool.replace(new)
    await answer(new)
    assert (await embedding).embeddings == [[5.0, 0.0]]


async def test_a_prompt_that_two_engines_died_with_is_given_up() -> None:
    engines = prefill_engine(0), prefill_engine(1)
    pool = FakePool(engines[0])
    embedding = asyncio.create_task(serving_of(pool=pool).embed(HELLO))
    await engines[0].next_request()
    pool.replace(engines[1])
    engines[0].lose()
    await engines[1].next_request()
    engines[1].lose()
    with pytest.raises(EngineFailed, match="2 engines died with the request") as failed:
        await embedding
    assert not failed.value.can_resume


async def test_one_prompt_that_fails_ends_the_others() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill)
    embedding = asyncio.create_task(serving.embed(replace(HELLO, inputs=[TextPrompt("a"), TextPrompt("b")])))
    first, second = await prefill.next_request(), await prefill.next_request()
    prefill.send(first, 0, [], finish_reason=FinishReason.ERROR, error="no room")
    with pytest.raises(EngineFailed, match="gave the request up: no room"):
        await embedding
    assert prefill.aborted == [second.request_id]
    assert serving.num_requests_in_flight == 0


async def test_numbers_that_are_not_finite_are_no_answer() -> None:
    prefill = prefill_engine()
    embedding = asyncio.create_task(serving_of(prefill).embed(HELLO))
    await answer(prefill, [float("nan"), 1.0])
    with pytest.raises(EngineFailed, match="not finite"):
        await embedding


async def test_who_leaves_or_is_out_of_time_leaves_nothing_behind() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill)
    embedding = asyncio.create_task(serving.embed(replace(HELLO, timeout_s=600.0)))
    await prefill.next_request()
    let_pass(600.0)
    with pytest.raises(DeadlineExceeded):
        await embedding
    embedding = asyncio.create_task(serving.embed(HELLO))
    second = await prefill.next_request()
    embedding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await embedding
    assert prefill.aborted == [prefill.submitted[0].request_id, second.request_id]
    assert (prefill.num_unfinished_requests, serving.num_requests_in_flight) == (0, 0)


async def test_the_engines_get_a_part_of_a_large_call_at_a_time() -> None:
    prefill = prefill_engine()
    num_inputs = MAX_PROMPTS_AT_ONCE + 9
    embedding = asyncio.create_task(
        serving_of(prefill).embed(replace(HELLO, inputs=[TextPrompt("a" * (1 + n % 50)) for n in range(num_inputs)]))
    )
    waiting = [await prefill.next_request() for _ in range(MAX_PROMPTS_AT_ONCE)]
    await asyncio.sleep(0)
    assert len(prefill.submitted) == MAX_PROMPTS_AT_ONCE
    async with Answering(prefill):
        for request in waiting:
            prefill.send(
                request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[len(request.prompt_token_ids), 0.0]
            )
        result = await embedding
    assert [int(vector[0]) for vector in result.embeddings] == [1 + n % 50 for n in range(num_inputs)]


async def test_a_call_counts_as_one_request_and_its_tokens_as_used() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill, max_requests_in_flight=1)
    allowance = Allowance("token", AllowanceLimits(tokens_per_s=1.0, burst_s=10), Clock())
    caller = Caller("token", tenant="t", allowance=allowance)
    request = replace(HELLO, inputs=[TextPrompt("hello")] * 3, caller=caller, cache_salt="s")
    embedding = asyncio.create_task(serving.embed(request))
    first = await answer(prefill)
    assert (first.tenant, first.cache_salt) == ("t", "t/s")
    with pytest.raises(Overloaded):
        await serving.embed(replace(HELLO, request_id="other"))
    async with Answering(prefill):
        await embedding
    with pytest.raises(AllowanceSpent):
        await serving.embed(request)


async def test_a_call_goes_to_a_version_that_has_engines_for_it_and_stays_with_the_one_it_names() -> None:
    old, new = prefill_engine(0), FakeEngine("d1", EngineRole.DECODE, model_version=2)
    serving = serving_of(old, new, num_versions=2)
    async with Answering(old):
        assert (await serving.embed(HELLO)).model_version == 1
        assert (await serving.embed(replace(HELLO, model_version=1))).model_version == 1
    with pytest.raises(NoEngineAvailable):
        await serving.embed(replace(HELLO, model_version=2))
    with pytest.raises(EngineFailed, match="model version 3 is not loaded yet"):
        await serving.embed(replace(HELLO, model_version=3))


async def test_a_call_starts_over_when_its_version_leaves_in_the_middle() -> None:
    old, new = prefill_engine(0), prefill_engine(1, model_version=2)
    pool = FakePool(old)
    embedding = asyncio.create_task(
        serving_of(pool=pool, num_versions=2).embed(replace(HELLO, inputs=[TextPrompt("a"), TextPrompt("bb")]))
    )
    await answer(old)
    await old.next_request()
    pool.replace(new)
    old.lose(has_left=True)
    async with Answering(new):
        result = await embedding
    assert (result.embeddings, result.model_version) == ([[1.0, 0.0], [2.0, 0.0]], 2)
    assert len(new.submitted) == 2, "vectors of two versions are never mixed"


async def test_classes_come_with_their_labels() -> None:
    prefill = prefill_engine()
    request = ClassifyRequest(inputs=[TextPrompt("a"), TextPrompt("bb")], activate=False)
    async with Answering(prefill):
        result = await serving_of(prefill, facts=CLASSIFIES).classify(request)
    assert result == ClassifyResult([[1.0, 0.0], [2.0, 0.0]], ("bad", "good"), Usage(3, 0, 3), model_version=1)
    assert prefill.submitted[0].pooling_params == PoolingParams(task="classify", activate=False)


async def test_documents_are_scored_by_a_head_of_one_class_that_reads_them_with_the_query() -> None:
    prefill = prefill_engine()
    scoring = asyncio.create_task(
        serving_of(prefill, facts=SCORES).score(
            ScoreRequest(query=TextPrompt("q"), documents=[TextPrompt("one"), TextPrompt("three")])
        )
    )
    first = await answer(prefill, [0.25])
    await answer(prefill, [0.75])
    assert await scoring == ScoreResult([0.25, 0.75], Usage(10, 0, 4), model_version=1)
    assert bytes(first.prompt_token_ids) == b"qone"


async def test_documents_are_scored_by_the_cosine_of_embeddings() -> None:
    prefill = prefill_engine()
    scoring = asyncio.create_task(
        serving_of(prefill).score(ScoreRequest(query=TextPrompt("q"), documents=[TextPrompt("a"), TextPrompt("b")]))
    )
    for vector in ([0.6, 0.8], [0.8, 0.6], [-0.6, -0.8]):
        request = await answer(prefill, vector)
        assert request.pooling_params == PoolingParams(pooling="mean", normalize=True)
    assert (await scoring).scores == pytest.approx([0.96, -1.0])


async def test_two_calls_of_one_id_are_not_in_flight_at_once() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill)
    embedding = asyncio.create_task(serving.embed(HELLO))
    request = await prefill.next_request()
    with pytest.raises(InvalidRequest, match="request_id"):
        await serving.embed(HELLO)
    prefill.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[1.0, 0.0])
    await embedding
