"""Log-probabilities, of the prompt as well, are those of transformers' own logits, wherever a request was.

Tests of actors/model/sampling/prompt_logprobs.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import EngineConfig, SpeculativeConfig
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import SamplingParams
from tests.actors.logprobs import assert_are_the_models
from tests.actors.speculation import EAGER, proposing, right_by_chance
from tests.actors.test_multi_rank_engine import running
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.usefixtures("shared_models")

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 20
NUM_TOP = 3
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
)
PROMPTS = {f"prompt of {length}": random_prompt(length) for length in (1, 2, 16, 45)}


def config_of(
    directory: Path, *, num_blocks: int = 256, overlap: bool = False, speculative: SpeculativeConfig | None = None
) -> EngineConfig:
    """Steps that cut the prompts here and there."""
    config = engine_config(directory, block_size=8, num_blocks=num_blocks, max_num_batched_tokens=40, overlap=overlap)
    settings = {"max_prompt_logprobs_per_step": 11, "speculative": speculative}
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update=settings)})


def assert_right(answer: Answer, directory: Path, prompt: list[int]) -> None:
    assert answer.token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
    assert_are_the_models(answer.prompt_logprobs, directory, prompt, 1, NUM_TOP)
    assert_are_the_models(answer.logprobs, directory, prompt + answer.token_ids, len(prompt), NUM_TOP)


@pytest.mark.parametrize("overlap", [False, True])
def test_handed_over_requests_have_them_without_a_seam(overlap: bool, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = config_of(directory, overlap=overlap)
    with EnginePair(config, config) as pair:
        for name, prompt in PROMPTS.items():
            # What both engines have cached does not save the prompt's computation.
            pair.hand_over(f"{name}, plain", prompt, replace(PARAMS, prompt_logprobs=None))
        pair.run()
        for name, prompt in PROMPTS.items():
            pair.hand_over(name, prompt, PARAMS)
        pair.run()
        for name, prompt in PROMPTS.items():
            assert_right(pair.answers[name], directory, prompt)
            assert pair.answers[name].timings("prefill").num_prompt_tokens_computed == len(prompt)
            assert pair.answers[name].timings("decode").num_prompt_tokens_computed == 0
        pair.assert_whole()


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_have_them_once(overlap: bool, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = config_of(directory, num_blocks=12, overlap=overlap)
    with EnginePair(config_of(directory), config) as pair:
        for name, prompt in PROMPTS.items():
            pair.submit("decode", f"{name}, alone", prompt, PARAMS, None)
            pair.hand_over(name, prompt, PARAMS)
        pair.run()
        assert pair.engines["decode"].make_stats().num_preemptions > 0
        for name, prompt in PROMPTS.items():
            assert_right(pair.answers[name], directory, prompt)
            assert_right(pair.answers[f"{name}, alone"], directory, prompt)
        pair.assert_whole()


def test_drafted_tokens_have_them_too(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    answers = {tuple(prompt): greedy_tokens(directory, tuple(prompt), NUM_TOKENS) for prompt in PROMPTS.values()}
    with (
        proposing(right_by_chance(answers)),
        EnginePair(config_of(directory), config_of(directory, speculative=EAGER)) as pair,
    ):
        for name, prompt in PROMPTS.items():
            pair.submit("decode", f"{name}, alone", prompt, PARAMS, None)
            pair.hand_over(name, prompt, PARAMS)
        pair.run()
        for name, prompt in PROMPTS.items():
            assert_right(pair.answers[name], directory, prompt)
            assert_right(pair.answers[f"{name}, alone"], directory, prompt)


def test_all_ranks_of_an_engine_compute_them(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), PROMPTS["prompt of 45"]
    answer = Answer()
    with running(directory, RankThreads, size=2) as engine:
        engine.core.submit(EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=PARAMS))
        while not answer.is_finished:
            for batch in engine.core.step().outputs.values():
                for output in batch.outputs:
                    answer.take("engine", output)
    assert_right(answer, directory, prompt)


def test_a_resumed_request_has_had_them(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), PROMPTS["prompt of 45"]
    tokens = greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
    config = config_of(directory)
    with EnginePair(config, config) as pair:
        pair.submit("decode", "before", prompt, replace(PARAMS, prompt_logprobs=None), None)
        pair.run()
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling_params=PARAMS,
            output_token_ids=tokens[:4],
            arrival_time_s=time.monotonic(),
        )
        pair.answers["r"] = Answer(token_ids=tokens[:4])
        pair.engines["decode"].submit(request)
        pair.run()
        answer = pair.answers["r"]
        assert answer.token_ids == tokens
        assert answer.prompt_logprobs is None
        assert_are_the_models(answer.logprobs, directory, prompt + tokens, len(prompt) + 4, NUM_TOP)
        assert answer.timings("decode").num_cached_tokens > 0, "nothing is wanted of the prompt any more"


def test_a_request_that_its_first_token_ends_has_them(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), PROMPTS["prompt of 16"]
    config = config_of(directory)
    with EnginePair(config, config) as pair:
        pair.hand_over("r", prompt, replace(PARAMS, max_tokens=1))
        pair.run()
        answer = pair.answers["r"]
        assert answer.last["prefill"].finish_reason is FinishReason.LENGTH
        assert_are_the_models(answer.prompt_logprobs, directory, prompt, 1, NUM_TOP)
        pair.assert_whole()
