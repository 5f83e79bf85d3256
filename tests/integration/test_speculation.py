"""Drafts through a handoff: the decode engine drafts, the prefill engine does not, the tokens are what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.config import EngineConfig
from actors.core.requests.sampling_params import SamplingParams
from tests.actors.speculation import EAGER, SpeculatingEngine, proposing, right_by_chance
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.usefixtures("shared_models")

CheckpointOf = Callable[[str], Path]

NUM_OUTPUT_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
PROMPTS = {f"r{index}": random_prompt(26 + index, seed=index) for index in range(4)}


def speculating(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"speculative": EAGER})})


def greedy(directory: Path) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): greedy_tokens(directory, tuple(prompt), NUM_OUTPUT_TOKENS) for prompt in PROMPTS.values()}


def sampled(directory: Path) -> dict[tuple[int, ...], list[int]]:
    seen = SpeculatingEngine(directory, None).run({name: (prompt, SAMPLED) for name, prompt in PROMPTS.items()})
    return {tuple(prompt): seen[name].token_ids for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_short_of_blocks", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_handed_over_requests_keep_their_tokens(
    params: SamplingParams, is_short_of_blocks: bool, overlap: bool, checkpoint: CheckpointOf
) -> None:
    check_handed_over(checkpoint("llama"), params, is_short_of_blocks=is_short_of_blocks, overlap=overlap)


@pytest.mark.more
@pytest.mark.parametrize("family", ["gemma4", "mimo", "deepseek_v3"])
def test_handed_over_requests_keep_their_tokens_where_layers_differ(family: str, checkpoint: CheckpointOf) -> None:
    check_handed_over(checkpoint(family), GREEDY, is_short_of_blocks=True, overlap=True)


def check_handed_over(directory: Path, params: SamplingParams, *, is_short_of_blocks: bool, overlap: bool) -> None:
    expected = greedy(directory) if params is GREEDY else sampled(directory)
    prefill = engine_config(directory, block_size=8, overlap=overlap)
    # Each request begins with 4 blocks and ends with 9: 17 hold all the prompts, but not two requests' outputs.
    num_blocks = 17 if is_short_of_blocks else 64
    decode = engine_config(directory, block_size=8, num_blocks=num_blocks, overlap=overlap)
    with proposing(right_by_chance(expected)), EnginePair(speculating(prefill), speculating(decode)) as pair:
        for request_id, prompt in PROMPTS.items():
            pair.hand_over(request_id, prompt, params)
        pair.run()

        answers = {tuple(prompt): pair.answers[name].token_ids for name, prompt in PROMPTS.items()}
        assert answers == expected
        decoded = pair.engines["decode"].make_stats()
        assert (decoded.num_preemptions > 0) == is_short_of_blocks
        assert decoded.spec_decoding_stats is not None
        assert 0 < decoded.spec_decoding_stats.num_accepted_tokens < decoded.spec_decoding_stats.num_draft_tokens
        assert decoded.num_steps < 4 * NUM_OUTPUT_TOKENS
        prefilled = pair.engines["prefill"].make_stats().spec_decoding_stats
        assert prefilled is not None
        assert prefilled.num_drafts == 0
        pair.assert_whole()


def test_a_request_may_be_aborted_while_its_drafts_are_checked(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = speculating(engine_config(directory, block_size=8, overlap=True))
    with proposing(right_by_chance(greedy(directory))), EnginePair(config, config) as pair:
        for request_id, prompt in PROMPTS.items():
            pair.hand_over(request_id, prompt, GREEDY)
        pair.run(lambda: len(pair.answers["r0"].token_ids) > 8)
        pair.abort("r0")
        pair.run()
        pair.assert_whole()
        for name in ("r1", "r2", "r3"):
            assert pair.answers[name].token_ids == greedy(directory)[tuple(PROMPTS[name])]
