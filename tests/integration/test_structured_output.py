"""Structured output through a running cluster: what P begins D completes, and whoever goes on after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from actors.config import EngineConfig, GrammarConfig
from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.errors import InvalidRequest
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.serving import Serving
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.local_cluster import local_cluster
from tests.integration.recovering_cluster import recovering_cluster
from tests.integration.test_leaks import until_idle
from tests.reference import random_prompt
from tests.structured import KINDS, MAX_WHITESPACE, compiling_in_process, constrained_tokens

pytestmark = pytest.mark.timeout(120)

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 80
TIMEOUT_S = 60.0
PROMPTS = {name: random_prompt(20 + index, seed=index) for index, name in enumerate(KINDS)}


def config_of(directory: Path) -> EngineConfig:
    config = engine_config(directory, block_size=8, overlap=True, transfer=KVTransferConfig(transport="tcp"))
    grammar = GrammarConfig(max_whitespace=MAX_WHITESPACE, compile_timeout_s=TIMEOUT_S)
    changed = {"grammar": grammar, "grammar_timeout_s": TIMEOUT_S}
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update=changed)})


def request_of(name: str, params: StructuredOutputParams) -> GenerateRequest:
    sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, structured_output=params)
    return GenerateRequest(request_id=name, prompt=TokenPrompt(PROMPTS.get(name, [5])), sampling=sampling)


async def token_ids_of(chunks: AsyncGenerator[GenerateChunk, None]) -> list[int]:
    async with aclosing(chunks):
        return [token_id async for chunk in chunks for token_id in chunk.token_ids]


async def ask_all(serving: Serving) -> dict[str, list[int]]:
    answers = await asyncio.gather(
        *(token_ids_of(serving.generate(request_of(name, params))) for name, params in KINDS.items())
    )
    return dict(zip(KINDS, answers, strict=True))


async def refusal_of(serving: Serving, params: StructuredOutputParams) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        await token_ids_of(serving.generate(request_of("wrong", params)))
    return raised.value


def expected_tokens(directory: Path) -> dict[str, list[int]]:
    return {name: constrained_tokens(directory, PROMPTS[name], params, NUM_TOKENS) for name, params in KINDS.items()}


async def test_every_kind_is_compiled_beside_the_engines_and_a_wrong_one_is_the_clients_mistake(
    checkpoint: CheckpointOf,
) -> None:
    directory = checkpoint("llama")
    async with local_cluster(config_of(directory)) as cluster, asyncio.timeout(TIMEOUT_S):
        wrong = StructuredOutputParams("grammar", 'root ::= "a" nothing')
        answers, refusal = await asyncio.gather(ask_all(cluster.serving), refusal_of(cluster.serving, wrong))

        assert answers == expected_tokens(directory)
        [violation] = refusal.violations
        assert violation.field == "sampling_params.grammar"
        assert 'EBNF parser error at line 1, column 14: Rule "nothing" is not defined' in violation.allowed
        for name, stats in (await until_idle(cluster)).items():
            assert stats.num_free_blocks == stats.num_blocks, name
            cluster.engines[name].check_integrity()


async def test_a_form_is_completed_by_another_engine_when_one_dies_in_the_middle(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = expected_tokens(directory)
    with compiling_in_process():
        async with (
            recovering_cluster(config_of(directory), ["prefill-0", "decode-0", "decode-1"]) as cluster,
            asyncio.timeout(TIMEOUT_S),
        ):
            await cluster.join("prefill-0", "decode-0")
            cut = min(map(len, expected.values())) // 2
            cluster.tap.close(["decode-0"], cut, num_requests=len(KINDS))
            asking = asyncio.create_task(ask_all(cluster.serving))
            await cluster.tap.has_stopped.wait()
            await cluster.join("decode-1")
            await cluster.kill("decode-0")
            assert await asking == expected
            await cluster.until_idle()


async def test_an_end_by_the_form_is_a_stop(checkpoint: CheckpointOf) -> None:
    with compiling_in_process():
        async with local_cluster(config_of(checkpoint("llama"))) as cluster, asyncio.timeout(TIMEOUT_S):
            async with aclosing(cluster.serving.generate(request_of("choice", KINDS["choice"]))) as chunks:
                answer = [chunk async for chunk in chunks]
            assert "".join(chunk.text for chunk in answer) in ('the first "one"\n', "the second é")
            end = answer[-1].end
            assert end is not None
            assert end.finish_reason is FinishReason.STOP
