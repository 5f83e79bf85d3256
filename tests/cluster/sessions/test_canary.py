"""A pair is proven by tokens that its decode engine alone finds right; a model that gives none, by its vectors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.model_facts import ModelFacts
from cluster.errors import CanaryFailed
from cluster.routing.engine_connection import EngineRole
from cluster.sessions.canary import run_canary
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
            await run_canary(*engines, FACTS, timeout_s=60.0)
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
        await run_canary(None, engine, facts, timeout_s=60.0)
    [request] = engine.submitted
    assert request.pooling_params is not None
    assert (request.pooling_params.task, request.pooling_params.activate) == ("classify", False)


Tokens = list[tuple[int, float]]
"""Ids and log-probabilities."""


@dataclass(frozen=True)
class Prompt:
    """The tokens that engines make of one prompt.

    forced: what the decode engine alone finds of the pair's tokens; best: by which log-probability the likeliest token
    of each position stands before the pair's; spread: of the likeliest tokens
    """

    pair: Tokens
    alone: Tokens
    forced: tuple[float, ...] = ()
    best: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    spread: float = 8.0


EQUAL = Prompt([(7, -1.0)] * 4, [(7, -1.0)] * 4)
NEAR_TIE = Prompt(
    [(7, -1.0), (8, -2.0), (9, -1.0), (5, -0.5)],
    [(7, -1.0), (6, -1.98), (3, -1.0), (4, -0.1)],
    (-1.0, -2.01, -1.05, -0.52),
    (0.0, 0.03, 0.0, 0.0),
)
CORRUPTED = Prompt([(7, -1.0), (8, -0.2), (9, -0.1), (5, -0.1)], [(7, -1.0)] * 4, (-1.0, -6.0, -9.0, -4.0))
FLAT_AND_CORRUPTED = Prompt(
    [(7, -1.0), (8, -3.1), (9, -3.2), (5, -3.1)], [(7, -1.0)] * 4, (-1.0, -3.3, -3.0, -3.2), (0.0, 2.9, 2.8, 0.0)
)


class Model:
    """Two engines, by what they make of the prompts that they are asked, in their order."""

    def __init__(self, *prompts: Prompt) -> None:
        self._prompts = iter(prompts)
        self._now: Prompt | None = None
        self._begun: asyncio.Queue[Prompt] = asyncio.Queue()
        self.num_prompts = 0
        self.salts: list[str | None] = []

    async def run(self, dtype: str) -> None:
        layout = replace(LAYOUT, dtype=dtype)
        prefill, decode = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
        answering = [asyncio.create_task(self._prefill(prefill)), asyncio.create_task(self._decode(decode))]
        try:
            await run_canary(prefill, decode, ModelFacts(64, 257, (), layout), timeout_s=60.0)
        finally:
            for task in answering:
                task.cancel()

    async def _prefill(self, engine: FakeEngine) -> None:
        while True:
            request = await engine.next_request()
            prompt = next(self._prompts)
            self._begun.put_nowait(prompt)
            self.num_prompts += 1
            self._send(engine, request, 0, prompt.pair[:1], end_cause=EndCause.HANDED_OVER)

    async def _decode(self, engine: FakeEngine) -> None:
        while True:
            request = await engine.next_request()
            self.salts.append(request.cache_salt)
            if request.kv_transfer_params is not None:
                self._now = await self._begun.get()
                self._send(engine, request, 1, self._now.pair[1:])
                continue
            assert self._now is not None
            if request.sampling_params.prompt_logprobs is None:
                self._send(engine, request, 0, self._now.alone)
                continue
            forced = [
                TokenLogprobs([token_id, 0, 1], [logprob, logprob + lead, logprob + lead - self._now.spread], 1)
                for (token_id, _), logprob, lead in zip(self._now.pair, self._now.forced, self._now.best, strict=True)
            ]
            assert request.prompt_token_ids[-4:] == [token_id for token_id, _ in self._now.pair]
            others = [TokenLogprobs([0], [-1.0], 1)] * (len(request.prompt_token_ids) - 5)
            engine.send(request, 0, [1], finish_reason=FinishReason.LENGTH, prompt_logprobs=others + forced)

    @staticmethod
    def _send(
        engine: FakeEngine,
        request: EngineCoreRequest,
        position: int,
        tokens: Tokens,
        *,
        end_cause: EndCause | None = None,
    ) -> None:
        engine.send(
            request,
            position,
            [token_id for token_id, _ in tokens],
            finish_reason=None if end_cause else FinishReason.LENGTH,
            end_cause=end_cause,
            logprobs=[TokenLogprobs([token_id], [logprob], 1) for token_id, logprob in tokens],
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_equal_tokens_prove_a_pair_without_another_question(dtype: str) -> None:
    model = Model(EQUAL)
    await model.run(dtype)
    assert len(set(model.salts)) == len(model.salts) == 2


async def test_a_near_tie_in_16_bits_is_no_fault() -> None:
    model = Model(NEAR_TIE)
    await model.run("bfloat16")
    assert model.num_prompts == 1
    assert len(set(model.salts)) == len(model.salts) == 3


@pytest.mark.parametrize(
    "prompt",
    [CORRUPTED, FLAT_AND_CORRUPTED, replace(NEAR_TIE, forced=(-1.0, -2.3, -1.05, -0.52), spread=0.5)],
    ids=["corrupted", "flat", "all tokens are alike"],
)
async def test_kv_that_is_wrong_is_found_in_16_bits_though_two_prompts_are_tried(prompt: Prompt) -> None:
    model = Model(prompt, prompt)
    with pytest.raises(CanaryFailed, match=r"p0 -> d0: tokens .* the two engines do not compute the same"):
        await model.run("bfloat16")
    assert model.num_prompts == 2


async def test_a_prompt_that_suits_a_model_badly_is_followed_by_another_one() -> None:
    badly = replace(NEAR_TIE, forced=(-1.0, -2.9, -1.05, -0.52))
    model = Model(badly, NEAR_TIE)
    await model.run("bfloat16")
    assert model.num_prompts == 2


@pytest.mark.parametrize("prompt", [NEAR_TIE, CORRUPTED])
async def test_in_float32_on_cpus_nothing_but_a_tie_may_differ(prompt: Prompt) -> None:
    model = Model(prompt)
    with pytest.raises(CanaryFailed, match="the two engines do not compute the same"):
        await model.run("float32")
    assert model.num_prompts == 1


async def test_a_tie_in_float32_is_no_fault() -> None:
    pair = [(7, -1.0), (8, -2.0), (9, -1.0), (5, -0.5)]
    alone = [(7, -1.0), (6, -2.0), (3, -1.0), (4, -0.1)]
    await Model(Prompt(pair, alone, (-1.0, -2.0001, -1.0, -0.5001), (0.0, 0.0002, 0.0, 0.0))).run("float32")


async def test_tokens_that_are_no_ones_choice_prove_nothing() -> None:
    nan = [(7, float("nan"))] * 4
    with pytest.raises(CanaryFailed, match="no finite log-probabilities"):
        await Model(Prompt(nan, nan)).run("bfloat16")
    forced = (-1.0, float("nan"), -1.0, -0.5)
    with pytest.raises(CanaryFailed, match="do not compute the same"):
        await Model(replace(NEAR_TIE, forced=forced), replace(NEAR_TIE, forced=forced)).run("bfloat16")
