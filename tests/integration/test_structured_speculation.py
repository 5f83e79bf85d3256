"""Structured output may be drafted too: the same tokens, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import SpeculativeConfig
from actors.core.outputs.scheduler_stats import SchedulerStats, SpecDecodingStats
from actors.core.requests.sampling_params import SamplingParams
from tests.actors.speculation import EAGER, ProposerMaker, always_right, always_wrong, proposing, right_by_chance
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.structured import KINDS, compiling_in_process, constrained_tokens

pytestmark = pytest.mark.usefixtures("shared_models")

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 80
_MAX_TRIES = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
PROMPTS = {name: random_prompt(20 + index, seed=index) for index, name in enumerate([*KINDS, "free"])}


@pytest.fixture(autouse=True)
def _no_processes() -> Iterator[None]:
    with compiling_in_process():
        yield


def answer_all(
    directory: Path,
    speculative: SpeculativeConfig | None,
    proposer: ProposerMaker | None = None,
    *,
    num_blocks: int = 64,
    params: SamplingParams = GREEDY,
) -> tuple[dict[str, Answer], SpecDecodingStats | None]:
    """Hand a request of each form over, and return the answers and what D's drafts were worth.

    With few blocks, until some were preempted: on a busy machine one may be over before the next one has come.
    """
    for _ in range(_MAX_TRIES):
        answers, stats = _answer_all_once(directory, speculative, proposer, num_blocks, params)
        if (stats.num_preemptions > 0) == (num_blocks < 64):
            return answers, stats.spec_decoding_stats
    raise AssertionError(f"{stats.num_preemptions} requests were preempted")


def _answer_all_once(
    directory: Path,
    speculative: SpeculativeConfig | None,
    proposer: ProposerMaker | None,
    num_blocks: int,
    params: SamplingParams,
) -> tuple[dict[str, Answer], SchedulerStats]:
    prefill = engine_config(directory, block_size=8)
    decode = engine_config(directory, block_size=8, num_blocks=num_blocks)
    decode = decode.model_copy(update={"scheduler": decode.scheduler.model_copy(update={"speculative": speculative})})
    with proposing(proposer), EnginePair(prefill, decode) as pair:
        for name, prompt in PROMPTS.items():
            kind = KINDS.get(name)
            pair.hand_over(name, prompt, replace(params, structured_output=kind, ignore_eos=kind is None))
        pair.run()
        stats = pair.engines["decode"].make_stats()
        pair.assert_whole()
        return pair.answers, stats


@pytest.mark.parametrize("num_blocks", [17, 64])
@pytest.mark.parametrize("make_proposer", [always_right, always_wrong, right_by_chance])
def test_the_form_is_kept_whatever_is_drafted(
    make_proposer: Callable[[dict[tuple[int, ...], list[int]]], ProposerMaker],
    num_blocks: int,
    checkpoint: CheckpointOf,
) -> None:
    directory = checkpoint("llama")
    expected = {
        name: constrained_tokens(directory, PROMPTS[name], params, NUM_TOKENS) for name, params in KINDS.items()
    }
    assert all(tokens[-1] == EOS_TOKEN_ID for tokens in expected.values())
    expected["free"] = greedy_tokens(directory, tuple(PROMPTS["free"]), NUM_TOKENS)
    known = {tuple(PROMPTS[name]): tokens for name, tokens in expected.items()}
    answers, stats = answer_all(directory, EAGER, make_proposer(known), num_blocks=num_blocks)
    assert {name: answer.token_ids for name, answer in answers.items()} == expected
    assert stats is not None
    if make_proposer is always_right:
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0
    if make_proposer is always_wrong:
        # Most wrong drafts are against the grammar, and never checked.
        assert stats.num_accepted_tokens == 0


def test_sampled_forms_are_those_of_an_engine_without_drafts(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    params = replace(GREEDY, temperature=1.3, top_p=0.95, presence_penalty=0.5, seed=4)
    plain, _ = answer_all(directory, None, params=params)
    known = {tuple(PROMPTS[name]): answer.token_ids for name, answer in plain.items()}
    drafted, stats = answer_all(directory, EAGER, right_by_chance(known), params=params)
    assert {name: answer.token_ids for name, answer in drafted.items()} == {
        name: answer.token_ids for name, answer in plain.items()
    }
    assert stats is not None
    assert stats.num_accepted_tokens > 0
