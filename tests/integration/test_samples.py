"""Samples of one prompt, on real engines: each is what it would be alone, and the prompt is computed and sent once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from actors.config import EngineConfig
from cluster.errors import DeadlineExceeded
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest, SampleChunk
from cluster.requests.serving import Serving
from tests.integration.promises import CUT, NUM_PROMPT_TOKENS, assert_same, engines_config
from tests.integration.recovering_cluster import RecoveringCluster, collect, recovering_cluster
from tests.reference import random_prompt

CheckpointOf = Callable[[str], Path]
Samples = dict[tuple[int, int], list[GenerateChunk]]

_BLOCK_SIZE: Final = 8
_NUM_FULL_BLOCKS: Final = NUM_PROMPT_TOKENS // _BLOCK_SIZE
_N: Final = 5
_TIMEOUT_S: Final = 60.0
_SAMPLING: Final = SamplingOptions(temperature=1.2, seed=11, max_tokens=14, ignore_eos=True)
_EACH: Final = GenerateRequest(prompt=None, request_id="many", sampling=_SAMPLING)
_PROMPT: Final = TokenPrompt(random_prompt(NUM_PROMPT_TOKENS))


def many(*, n: int = _N, best_of: int | None = None, each: GenerateRequest = _EACH) -> GenerateManyRequest:
    return GenerateManyRequest(prompts=[_PROMPT], n=n, best_of=best_of, each=each)


async def collect_many(serving: Serving, request: GenerateManyRequest) -> Samples:
    samples: Samples = {}
    async with asyncio.timeout(_TIMEOUT_S), aclosing(serving.generate_many(request)) as chunks:
        async for one in chunks:
            samples.setdefault((one.prompt_index, one.sample_index), []).append(one.chunk)
    return samples


@asynccontextmanager
async def leader_waits(cluster: RecoveringCluster) -> AsyncIterator[None]:
    """Let the decode engine stand still after the leader's first tokens, until it has got the other samples too.

    On a busy machine the leader could be over by then, and nobody would hold its last block any more.
    """
    barrier, core = cluster.barriers["decode-0"], cluster.engines["decode-0"]._core
    assert core is not None
    barrier.close(3)

    async def open_in_time() -> None:
        await barrier.is_reached.wait()
        while len(core.scheduler.requests) + len(core._inbox) < _N:  # noqa: ASYNC110  # the engine's thread
            await asyncio.sleep(0.005)
        barrier.open()

    async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(open_in_time())
        yield


async def assert_are_as_alone(serving: Serving, request: GenerateManyRequest, samples: Samples) -> None:
    """By the same requests, one by one, each in a prefix cache of its own."""
    for (prompt_index, sample_index), chunks in samples.items():
        name = f"{prompt_index}.{sample_index}"
        alone = replace(
            request.each,
            prompt=request.prompts[prompt_index],
            request_id=f"alone {name}",
            sampling=replace(request.each.sampling, seed=chunks[0].seed),
            cache_salt=f"{request.each.cache_salt} {name}",
        )
        assert_same(name, chunks, await collect(serving, alone))


def with_overlap(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"overlap": True})})


def num_computed(cluster: RecoveringCluster, engine_id: str) -> int:
    return cluster.engines[engine_id].stats.num_prompt_tokens_computed


def num_received_blocks(cluster: RecoveringCluster) -> int:
    stats = cluster.engines["decode-0"].stats.transfer_stats
    assert stats is not None
    return stats.num_received_blocks


async def test_the_prompt_is_prefilled_and_sent_once_and_its_blocks_are_shared_and_its_last_one_copied(
    checkpoint: CheckpointOf,
) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        core = cluster.engines["decode-0"]._core
        assert core is not None
        most_shared = 0
        step = core.step

        def watching_step() -> object:
            nonlocal most_shared
            result = step()
            blocks = core.scheduler.kv_cache_manager.block_pool.blocks
            most_shared = max(most_shared, sum(block.ref_cnt == _N for block in blocks))
            return result

        core.step = watching_step  # type: ignore[method-assign,assignment]  # the engine's thread calls this one
        request = many()
        async with leader_waits(cluster):
            samples = await collect_many(cluster.serving, request)
        await cluster.until_idle()

        assert len(samples) == _N
        assert num_computed(cluster, "prefill-0") == NUM_PROMPT_TOKENS
        # Each computes the prompt's last token, for its own first one.
        assert num_computed(cluster, "decode-0") == _N - 1
        assert num_received_blocks(cluster) == _NUM_FULL_BLOCKS + 1
        assert most_shared == _NUM_FULL_BLOCKS
        ends = [chunks[-1].end for chunks in samples.values()]
        num_cached_tokens = sorted(end.usage.num_cached_tokens for end in ends if end is not None)
        assert num_cached_tokens == [0] + [NUM_PROMPT_TOKENS - 1] * (_N - 1)
        assert len({tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in samples.values()}) > 1
        await assert_are_as_alone(cluster.serving, request, samples)


async def test_samples_that_lose_their_blocks_to_each_other_are_what_they_are_alone(checkpoint: CheckpointOf) -> None:
    config = engines_config(checkpoint("llama"))
    few_blocks = config.cache.model_copy(update={"num_blocks": 16})
    config = config.model_copy(
        update={"cache": few_blocks, "model": config.model.model_copy(update={"max_model_len": 96})}
    )
    async with recovering_cluster(config, ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        request = many(each=replace(_EACH, sampling=replace(_SAMPLING, max_tokens=40)))
        samples = await collect_many(cluster.serving, request)
        await cluster.until_idle()
        stats = cluster.engines["decode-0"].stats
        assert stats.num_preemptions > 0
        assert num_received_blocks(cluster) == _NUM_FULL_BLOCKS + 1
        await assert_are_as_alone(cluster.serving, request, samples)
        await cluster.until_idle()


@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 40, 41, 47])
async def test_wherever_the_last_block_of_the_prompt_ends(num_prompt_tokens: int, checkpoint: CheckpointOf) -> None:
    config = with_overlap(engines_config(checkpoint("llama")))
    async with recovering_cluster(config, ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        request = replace(many(), prompts=[TokenPrompt(random_prompt(num_prompt_tokens))])
        async with leader_waits(cluster):
            samples = await collect_many(cluster.serving, request)
        await cluster.until_idle()
        assert num_computed(cluster, "prefill-0") == num_prompt_tokens
        assert num_computed(cluster, "decode-0") == _N - 1
        await assert_are_as_alone(cluster.serving, request, samples)
        await cluster.until_idle()


async def test_one_prompt_and_one_sample_is_a_plain_request(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        samples = await collect_many(cluster.serving, many(n=1))
        alone = replace(_EACH, prompt=_PROMPT, cache_salt="alone")
        assert_same("it", samples[0, 0], await collect(cluster.serving, alone))


async def test_samples_end_each_for_itself_and_the_first_has_what_the_prompt_has(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        sampling = replace(
            _SAMPLING, ignore_eos=False, stop_token_ids=tuple(range(3, 43)), logprobs=1, prompt_logprobs=1
        )
        request = GenerateManyRequest(
            prompts=[_PROMPT, TokenPrompt(random_prompt(19))], n=4, each=replace(_EACH, sampling=sampling)
        )
        samples = await collect_many(cluster.serving, request)
        ends = [chunks[-1].end for chunks in samples.values()]
        assert len({end.finish_reason for end in ends if end is not None}) == 2
        with_prompt_logprobs = {place for place, chunks in samples.items() if chunks[0].prompt_logprobs}
        assert with_prompt_logprobs == {(0, 0), (1, 0)}
        plain = replace(request, each=replace(request.each, sampling=replace(sampling, prompt_logprobs=None)))
        for chunks in samples.values():
            chunks[0] = replace(chunks[0], prompt_logprobs=None)
        await assert_are_as_alone(cluster.serving, plain, samples)
        await cluster.until_idle()


async def test_samples_that_their_first_token_ends_are_computed_once(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        request = many(each=replace(_EACH, sampling=replace(_SAMPLING, max_tokens=1)))
        samples = await collect_many(cluster.serving, request)
        await cluster.until_idle()
        num_own_tokens = NUM_PROMPT_TOKENS - _NUM_FULL_BLOCKS * _BLOCK_SIZE
        assert num_computed(cluster, "prefill-0") == NUM_PROMPT_TOKENS + (_N - 1) * num_own_tokens
        await assert_are_as_alone(cluster.serving, request, samples)


async def test_the_best_is_the_one_that_the_model_finds_likeliest(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["decode-0"]) as cluster:
        await cluster.join("decode-0")
        made: dict[int, float] = {}
        each = replace(_EACH, sampling=replace(_SAMPLING, logprobs=0))
        async with leader_waits(cluster), aclosing(cluster.serving.generate_many(many(each=each))) as chunks:
            async for one in chunks:
                if one.cumulative_logprob is not None:
                    made[one.sample_index] = one.cumulative_logprob
        async with leader_waits(cluster), aclosing(cluster.serving.generate_many(many(n=2, best_of=_N))) as chunks:
            best: list[SampleChunk] = [one async for one in chunks]
        assert [one.cumulative_logprob for one in best] == pytest.approx(sorted(made.values())[:-3:-1], abs=1e-3)
        await cluster.until_idle()
        num_own_tokens = NUM_PROMPT_TOKENS - _NUM_FULL_BLOCKS * _BLOCK_SIZE
        # The second time, nobody holds the last block when the first sample comes.
        assert num_computed(cluster, "decode-0") == NUM_PROMPT_TOKENS + num_own_tokens + 2 * (_N - 1)


async def test_all_samples_go_on_when_their_decode_engine_dies(checkpoint: CheckpointOf) -> None:
    engine_ids = ["prefill-0", "decode-0", "decode-1"]
    async with recovering_cluster(engines_config(checkpoint("llama")), engine_ids) as cluster:
        await cluster.join("prefill-0", "decode-0")
        cluster.tap.close(["decode-0"], CUT, _N)
        request = many()
        asking = asyncio.create_task(collect_many(cluster.serving, request))
        await asyncio.wait_for(cluster.tap.has_stopped.wait(), _TIMEOUT_S)
        await cluster.join("decode-1")
        await cluster.kill("decode-0")
        samples = await asking
        assert len(samples) == _N
        await assert_are_as_alone(cluster.serving, request, samples)
        await cluster.until_idle()


async def test_all_samples_begin_although_the_prefill_engine_dies_under_the_first(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        cluster.barriers["prefill-0"].close(0)
        request = many()
        asking = asyncio.create_task(collect_many(cluster.serving, request))
        await asyncio.wait_for(cluster.barriers["prefill-0"].is_reached.wait(), _TIMEOUT_S)
        async with leader_waits(cluster):
            await cluster.kill("prefill-0")
            samples = await asking
        assert len(samples) == _N
        await cluster.until_idle()
        assert num_computed(cluster, "decode-0") == NUM_PROMPT_TOKENS + _N - 1
        await assert_are_as_alone(cluster.serving, request, samples)
        await cluster.until_idle()


@pytest.mark.parametrize("num_chunks", [1, 8])
async def test_nothing_is_left_of_samples_that_nobody_waits_for(num_chunks: int, checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        chunks: AsyncGenerator[SampleChunk, None] = cluster.serving.generate_many(many())
        for _ in range(num_chunks):
            await anext(chunks)
        await chunks.aclose()
        assert cluster.serving.num_requests_in_flight == 0
        await cluster.until_idle()


async def test_their_deadline_is_the_calls(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(engines_config(checkpoint("llama")), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        cluster.barriers["prefill-0"].close(0)
        with pytest.raises(DeadlineExceeded):
            await collect_many(cluster.serving, many(each=replace(_EACH, timeout_s=0.3)))
        cluster.barriers["prefill-0"].open()
        assert cluster.serving.num_requests_in_flight == 0
        await cluster.until_idle()
