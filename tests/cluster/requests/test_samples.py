"""Several prompts and several samples of each: who waits for whom, what is refused, and which are the best.

Tests of cluster/api/protos/sample_seeds.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.api.protos.sample_seeds import sample_seed
from cluster.api.protos.side_by_side import side_by_side
from cluster.errors import InvalidRequest, Overloaded
from cluster.parameters.generation import GenerateRequest, TextPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersions
from cluster.requests.samples import GenerateManyRequest, SampleChunk, split
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineRole
from cluster.settings.input_limits import InputLimits
from kv_transfer.params import TransferRole
from tests.cluster.serving_setup import assert_nothing_is_left, make_pair, make_serving, make_version
from tests.fakes import FakeEngine

EACH = GenerateRequest(prompt=None, request_id="r", sampling=SamplingOptions(seed=3, max_tokens=3))


def many(*texts: str, n: int = 1, best_of: int | None = None, each: GenerateRequest = EACH) -> GenerateManyRequest:
    return GenerateManyRequest(prompts=[TextPrompt(text) for text in texts], n=n, best_of=best_of, each=each)


async def collect(serving: Serving, request: GenerateManyRequest) -> list[SampleChunk]:
    async with aclosing(serving.generate_many(request)) as chunks:
        return [chunk async for chunk in chunks]


def text_of(chunks: list[SampleChunk], prompt_index: int, sample_index: int) -> str:
    place = (prompt_index, sample_index)
    return "".join(one.chunk.text for one in chunks if (one.prompt_index, one.sample_index) == place)


def answer(engine: FakeEngine, request: EngineCoreRequest, text: str, logprob: float | None = None) -> None:
    logprobs = None if logprob is None else [TokenLogprobs([token], [logprob], 1) for token in text.encode()]
    engine.send(request, 0, text, finish_reason=FinishReason.LENGTH, logprobs=logprobs)


async def test_samples_follow_the_first_one_to_its_decode_engine() -> None:
    pair = make_pair()
    asking = asyncio.create_task(collect(pair.serving, many("hello", n=3)))
    producer, consumer = await pair.next_requests()
    assert producer.kv_transfer_params is not None
    assert producer.kv_transfer_params.role is TransferRole.PRODUCER

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 1, "b")
    followers = [await pair.decode.next_request() for _ in range(2)]

    assert [request.kv_transfer_params for request in followers] == [None, None]
    assert [request.prompt_token_ids for request in followers] == [list(b"hello")] * 2
    seeds = [request.sampling_params.seed for request in (producer, *followers)]
    assert seeds == [3, sample_seed(3, 1), sample_seed(3, 2)]
    assert len({producer.request_id, *(request.request_id for request in followers)}) == 3

    answer(pair.decode, followers[1], "xyz")
    answer(pair.decode, followers[0], "uvw")
    pair.decode.send(consumer, 2, "c", finish_reason=FinishReason.LENGTH)
    chunks = await asking
    assert [text_of(chunks, 0, index) for index in range(3)] == ["abc", "uvw", "xyz"]
    assert len(pair.prefill.submitted) == 1
    assert {one.chunk.seed for one in chunks if one.chunk.seed is not None} == set(seeds)
    assert_nothing_is_left(pair)


async def test_the_next_one_leads_if_the_first_is_through_before_anybody_could_follow() -> None:
    pair = make_pair()
    asking = asyncio.create_task(collect(pair.serving, many("hello", n=2)))
    for text in ("a", "b"):
        producer, consumer = await pair.next_requests()
        answer(pair.prefill, producer, text)
        pair.decode.let_go(consumer)

    chunks = await asking

    assert [text_of(chunks, 0, index) for index in range(2)] == ["a", "b"]
    assert_nothing_is_left(pair)


async def test_prompts_do_not_wait_for_each_other() -> None:
    pair = make_pair()
    asking = asyncio.create_task(collect(pair.serving, many("hello", "world", each=replace(EACH, request_id="x"))))
    pairs = [await pair.next_requests() for _ in range(2)]

    for producer, consumer in reversed(pairs):
        answer(pair.prefill, producer, bytes(producer.prompt_token_ids).decode().upper())
        pair.decode.let_go(consumer)

    chunks = await asking
    assert [text_of(chunks, index, 0) for index in range(2)] == ["HELLO", "WORLD"]


async def test_whose_engine_is_gone_goes_where_the_router_says() -> None:
    prefill, decode = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
    [first, second] = split(many("hello", n=2), InputLimits())
    other = FakeEngine("d1", EngineRole.DECODE)
    serving = make_serving(prefill, other)
    router = first.prompt.router(serving.newest_model().router)
    request = await first.prompt.process(serving.newest_model(), first.request)

    assert router.choose(request, [prefill, decode]).prefill is prefill
    first.prompt._home = decode.descriptor.key
    assert router.choose(request, [prefill, decode, other]).decode is decode
    assert router.choose(request, [prefill, decode, other]).prefill is None
    assert router.choose(request, [prefill, other]).prefill is prefill
    assert second.prompt is first.prompt


async def test_all_are_of_the_first_ones_model_version() -> None:
    engines = [FakeEngine(f"d{version}", EngineRole.DECODE, model_version=version) for version in (1, 2)]
    versions = ModelVersions(make_version(1))
    versions.put(make_version(2))
    serving = make_serving(*engines, versions=versions)
    asking = asyncio.create_task(collect(serving, many("hello", n=3)))
    waits = [asyncio.create_task(engine.next_request()) for engine in engines]
    [first], others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    home = engines[waits.index(first)]
    home.send(first.result(), 0, "a")
    answer(home, await home.next_request(), "bcd")
    answer(home, await home.next_request(), "efg")
    home.send(first.result(), 1, "bc", finish_reason=FinishReason.LENGTH)

    await asking

    assert [len(engine.submitted) for engine in engines if engine is not home] == [0]
    for other in others:
        other.cancel()


async def test_leaving_aborts_all_of_them() -> None:
    pair = make_pair()
    chunks = pair.serving.generate_many(many("hello", n=3))
    first = asyncio.create_task(anext(chunks))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    assert (await first).chunk.text == "a"
    pair.decode.send(consumer, 1, "b")
    await pair.decode.next_request()

    await chunks.aclose()

    assert_nothing_is_left(pair)


async def test_one_that_fails_ends_the_others() -> None:
    pair = make_pair()
    asking = asyncio.create_task(collect(pair.serving, many("hello", "world")))
    (producer, _), _ = await pair.next_requests(), await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.lose()

    with pytest.raises(Exception, match="d0"):
        await asking
    assert_nothing_is_left(pair)


async def test_all_are_admitted_or_none() -> None:
    pair = make_pair(max_requests_in_flight=2)
    with pytest.raises(Overloaded):
        await collect(pair.serving, many("hello", n=3))
    assert_nothing_is_left(pair)


async def test_the_best_have_the_largest_log_probability() -> None:
    pair = make_pair()
    asking = asyncio.create_task(collect(pair.serving, many("hello", n=2, best_of=3)))
    producer, consumer = await pair.next_requests()
    assert producer.sampling_params.logprobs == 0
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, logprobs=[TokenLogprobs([97], [-2.0], 1)])
    pair.decode.send(consumer, 1, "b", logprobs=[TokenLogprobs([98], [-2.0], 1)])
    followers = [await pair.decode.next_request() for _ in range(2)]
    answer(pair.decode, followers[0], "xy", -3.0)
    answer(pair.decode, followers[1], "uv", -0.25)
    pair.decode.send(consumer, 2, "c", finish_reason=FinishReason.LENGTH, logprobs=[TokenLogprobs([99], [-1.0], 1)])

    chunks = await asking

    assert [(one.sample_index, one.chunk.text, one.cumulative_logprob) for one in chunks] == [
        (0, "uv", -0.5),
        (1, "abc", -5.0),
    ]
    assert [one.chunk.seed for one in chunks] == [sample_seed(3, 2), 3]
    assert [one.chunk.logprobs for one in chunks] == [None, None], "nobody has asked for them"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (many(), "prompts is empty; allowed: at least one prompt"),
        (many("x", n=0), "n is 0; allowed: 1 to 4"),
        (many("x", n=10**9), "n is 1000000000; allowed: 1 to 4"),
        (many("x", n=2, best_of=1), "best_of is 1; allowed: n to 4"),
        (many("x", n=2, best_of=5), "best_of is 5; allowed: n to 4"),
        (many("x", "y", "z", n=4), "prompts is 12 samples; allowed: at most 8"),
        (many("x", each=replace(EACH, output_token_ids=(1,))), "output_token_ids is (1,); allowed: none"),
    ],
)
def test_what_is_too_many_or_makes_no_sense_is_refused(request_: GenerateManyRequest, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        split(request_, InputLimits(max_samples=4, max_samples_per_call=8))
    assert said in str(raised.value)


def test_seeds_are_the_requests_own_and_others_made_from_it() -> None:
    seeds = {(seed, index): sample_seed(seed, index) for seed in range(4) for index in range(8)}
    assert [seeds[seed, 0] for seed in range(4)] == [0, 1, 2, 3]
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    [alone] = split(many("x"), InputLimits())
    assert (alone.request.request_id, alone.request.sampling) == ("r", EACH.sampling)
    drawn = split(many("x", "y", n=2, each=replace(EACH, sampling=SamplingOptions())), InputLimits())
    assert len({sample.request.sampling.seed for sample in drawn}) == 4
    with_prompts = split(many("x", n=2, each=replace(EACH, sampling=SamplingOptions(prompt_logprobs=1))), InputLimits())
    assert [sample.request.sampling.prompt_logprobs for sample in with_prompts] == [1, None]


async def test_a_stream_that_fails_fails_the_whole() -> None:
    async def stream(items: list[int], error: Exception | None = None) -> AsyncGenerator[int, None]:
        for item in items:
            yield item
        if error is not None:
            raise error

    assert sorted([item async for item in side_by_side([stream([1, 2]), stream([3])])]) == [(0, 1), (0, 2), (1, 3)]
    with pytest.raises(ValueError, match="broken"):
        [item async for item in side_by_side([stream([1]), stream([], ValueError("broken"))])]
