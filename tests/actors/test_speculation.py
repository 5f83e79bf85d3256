"""With drafts or without, a request's tokens are the same: greedy and sampled, whatever is drafted.

Tests of actors/model/spec_decode/configured_proposer.py, actors/model/spec_decode/proposer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import SamplingParams
from tests.actors.speculation import (
    EAGER,
    ProposerMaker,
    SpeculatingEngine,
    always_right,
    always_wrong,
    right_by_chance,
)
from tests.reference import greedy_tokens, random_prompt
from tests.token_rules import ALLOWED, ruled_tokens, words_in

pytestmark = pytest.mark.usefixtures("shared_models")

CheckpointOf = Callable[[str], Path]

NUM_OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


def repetitive_prompt(length: int) -> list[int]:
    """Half as many tokens, twice."""
    return (random_prompt(length // 2) * 2)[:length] + random_prompt(length % 2)


PROMPTS = {str(length): tuple(repetitive_prompt(length)) for length in (1, 9, 16, 40, 41)}


def greedy(directory: Path) -> dict[tuple[int, ...], list[int]]:
    return {prompt: greedy_tokens(directory, prompt, NUM_OUTPUT_TOKENS) for prompt in PROMPTS.values()}


def all_with(params: SamplingParams) -> dict[str, tuple[tuple[int, ...], SamplingParams]]:
    return {name: (prompt, params) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("llama", "ngram"),
        ("llama", "right"),
        ("llama", "wrong"),
        ("llama", "by chance"),
        ("gemma2", "by chance"),
        ("mistral", "ngram"),
        ("opt", "wrong"),
    ],
)
def test_greedy_tokens_equal_generate_whatever_is_drafted(family: str, drafts: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    expected = greedy(directory)
    proposers: Mapping[str, ProposerMaker | None] = {
        "ngram": None,
        "right": always_right(expected),
        "wrong": always_wrong(expected),
        "by chance": right_by_chance(expected),
    }
    for num_batched_tokens, block_size, num_blocks in ((64, 8, 128), (11, 4, 37), (20, 1, 150)):
        engine = SpeculatingEngine(
            directory,
            proposer=proposers[drafts],
            max_num_batched_tokens=num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        # Twice: the second time prompts, and outputs, are found in the prefix cache.
        for _ in range(2):
            seen = engine.run(all_with(GREEDY))
            assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected
        assert engine.stats.num_draft_tokens > 0


def test_right_drafts_are_all_accepted_and_wrong_ones_never(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = greedy(directory)
    right = SpeculatingEngine(directory, proposer=always_right(expected))
    right.run(all_with(GREEDY))
    assert right.stats.num_accepted_tokens == right.stats.num_draft_tokens
    num_sampled = NUM_OUTPUT_TOKENS * len(PROMPTS) - right.stats.num_accepted_tokens
    # A token from the prompt's step, then four drafts and one token a step.
    assert num_sampled <= (1 + -(-(NUM_OUTPUT_TOKENS - 1) // 5)) * len(PROMPTS)

    wrong = SpeculatingEngine(directory, proposer=always_wrong(expected))
    wrong.run(all_with(GREEDY))
    assert wrong.stats.num_accepted_tokens == 0
    assert wrong.stats.num_draft_tokens > 0


def test_preempted_requests_go_on_with_the_same_tokens(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = greedy(directory)
    engine = SpeculatingEngine(directory, proposer=right_by_chance(expected), block_size=4, num_blocks=28)
    seen = engine.run(all_with(GREEDY))
    assert engine.scheduler.make_stats().num_preemptions > 0
    assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_same_where_steps_may_overlap(overlap: bool, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = greedy(directory)
    with SpeculatingEngine(
        directory, EAGER.model_copy(update={"min_acceptance": 0.5}), proposer=right_by_chance(expected), overlap=overlap
    ) as engine:
        seen = engine.run(all_with(GREEDY))
        assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected
        assert engine.stats.num_accepted_tokens > 0


def sampled_without_drafts(directory: Path, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    seen = SpeculatingEngine(directory, None).run(all_with(params))
    return {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()}


PARAMS: dict[str, SamplingParams] = {
    "plain": SAMPLED,
    "cold": replace(SAMPLED, temperature=0.3),
    "filtered": replace(SAMPLED, top_k=12, top_p=0.8, min_p=0.02),
    "penalties": replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "greedy with penalties": replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "bias": replace(GREEDY, logit_bias={7: 4.0, 8: -2.0}),
    "allowed tokens": replace(SAMPLED, allowed_token_ids=ALLOWED),
    "bad words": replace(GREEDY, bad_words=tuple((first, last) for first in range(300) for last in (first % 7, 50))),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_seeded_tokens_are_those_that_are_sampled_one_by_one(kind: str, checkpoint: CheckpointOf) -> None:
    directory, params = checkpoint("llama"), PARAMS[kind]
    expected = sampled_without_drafts(directory, params)
    for proposer in (None, right_by_chance(expected), always_right(expected)):
        engine = SpeculatingEngine(directory, proposer=proposer, max_num_batched_tokens=30)
        seen = engine.run(all_with(params))
        assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("drafts", ["ngram", "right without rules", "right", "by chance"])
def test_under_token_rules_greedy_tokens_equal_generate_whatever_is_drafted(
    drafts: str, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    params, expected = {}, {}
    for prompt in PROMPTS.values():
        words = words_in(directory, greedy(directory)[prompt]).token_ids
        params[prompt] = replace(GREEDY, bad_words=words, allowed_token_ids=() if len(prompt) < 40 else ALLOWED)
        allowed = params[prompt].allowed_token_ids
        expected[prompt] = ruled_tokens(directory, prompt, NUM_OUTPUT_TOKENS, allowed, words)
        assert expected[prompt] != greedy(directory)[prompt]
    proposers: Mapping[str, ProposerMaker | None] = {
        "ngram": None,
        "right without rules": always_right(greedy(directory)),
        "right": always_right(expected),
        "by chance": right_by_chance(expected),
    }
    engine = SpeculatingEngine(directory, proposer=proposers[drafts], max_num_batched_tokens=30)
    seen = engine.run({name: (prompt, params[prompt]) for name, prompt in PROMPTS.items()})
    assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected
    assert engine.stats.num_draft_tokens > 0
    if drafts == "right":
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


def test_a_resumed_request_draws_what_it_would_have_drawn(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = sampled_without_drafts(directory, SAMPLED)
    engine = SpeculatingEngine(directory, proposer=right_by_chance(expected))
    begun = {name: expected[prompt][:7] for name, prompt in PROMPTS.items()}
    seen = engine.run(all_with(SAMPLED), outputs=begun)
    assert {prompt: seen[name].token_ids for name, prompt in PROMPTS.items()} == expected


def assert_equal_with_drafts(directory: Path, params: SamplingParams) -> None:
    """Tokens, log-probabilities and ends must be those without drafts."""
    plain = SpeculatingEngine(directory, None).run(all_with(params))
    right = always_right({prompt: plain[name].token_ids for name, prompt in PROMPTS.items()})
    engine = SpeculatingEngine(directory, proposer=right)
    for name, seen in engine.run(all_with(params)).items():
        expected = plain[name]
        assert seen.token_ids == expected.token_ids
        assert seen.end is not None
        assert expected.end is not None
        assert seen.end.finish_reason == expected.end.finish_reason
        assert seen.end.stop_token_id == expected.end.stop_token_id
        assert len(seen.logprobs) == len(expected.logprobs)
        for own, other in zip(seen.logprobs, expected.logprobs, strict=True):
            assert (own.token_ids, own.rank) == (other.token_ids, other.rank)
            assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine.stats.num_accepted_tokens > 0


def test_logprobs_are_those_of_each_position(checkpoint: CheckpointOf) -> None:
    assert_equal_with_drafts(checkpoint("llama"), replace(SAMPLED, logprobs=3))


def test_a_stop_token_among_right_drafts_ends_the_request_there(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    tokens = greedy(directory)[PROMPTS["40"]]
    stop_token_id = tokens[6]
    params = replace(GREEDY, stop_token_ids=(stop_token_id,))
    assert_equal_with_drafts(directory, params)

    seen = SpeculatingEngine(directory, proposer=always_right(greedy(directory))).run(all_with(params))
    assert seen["40"].token_ids == tokens[: tokens.index(stop_token_id) + 1]
    assert seen["40"].end is not None
    assert seen["40"].end.finish_reason is FinishReason.STOP


def test_below_min_tokens_no_draft_brings_a_stop_token(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    stop_token_ids = tuple(greedy(directory)[PROMPTS["40"]][2:6])
    params = replace(GREEDY, stop_token_ids=stop_token_ids, min_tokens=11)
    plain = SpeculatingEngine(directory, None).run(all_with(params))
    # Drafted are the tokens of the request without min_tokens: these would stop it.
    engine = SpeculatingEngine(directory, proposer=always_right(greedy(directory)))
    for name, seen in engine.run(all_with(params)).items():
        assert seen.token_ids == plain[name].token_ids
        assert not set(seen.token_ids[:10]) & set(stop_token_ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6])
def test_max_tokens_is_kept_to_the_token(max_tokens: int, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = greedy(directory)
    engine = SpeculatingEngine(directory, proposer=always_right(expected))
    seen = engine.run(all_with(replace(GREEDY, max_tokens=max_tokens)))
    for name, prompt in PROMPTS.items():
        assert seen[name].token_ids == expected[prompt][:max_tokens]


def test_a_request_may_reach_the_models_longest_sequence(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    prompt = random_prompt(500)
    engine = SpeculatingEngine(directory, max_num_batched_tokens=512)
    seen = engine.run({"a": (prompt, replace(GREEDY, max_tokens=100))})
    assert seen["a"].token_ids == greedy_tokens(directory, tuple(prompt), 12)
    assert seen["a"].end is not None
    assert seen["a"].end.finish_reason is FinishReason.LENGTH
