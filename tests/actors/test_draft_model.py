"""A smaller model drafts; its own cache may be as small as it likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.config import SpeculativeConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.model.errors import UnsupportedModel
from tests.actors.speculation import EAGER, SpeculatingEngine
from tests.checkpoints import make_checkpoint
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]

NUM_OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)
PROMPTS = {str(length): tuple(random_prompt(length)) for length in (1, 9, 16, 40, 57)}


def drafting_with(directory: Path, **settings: int) -> SpeculativeConfig:
    update = {"method": "draft_model", "model": str(directory), **settings}
    return SpeculativeConfig.model_validate(EAGER.model_dump() | update)


def greedy(directory: Path) -> dict[str, list[int]]:
    return {name: greedy_tokens(directory, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()}


def run(engine: SpeculatingEngine, params: SamplingParams) -> dict[str, list[int]]:
    seen = engine.run({name: (prompt, params) for name, prompt in PROMPTS.items()})
    return {name: own.token_ids for name, own in seen.items()}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("other"), seed=9, num_hidden_layers=1)


PENALTIES = replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3, top_k=50)


@pytest.mark.parametrize(("num_batched_tokens", "all_params"), [(128, [SAMPLED, PENALTIES]), (11, [GREEDY])])
def test_a_model_that_is_the_target_itself_is_always_right(
    num_batched_tokens: int, all_params: list[SamplingParams], checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    for params in all_params:
        expected = run(SpeculatingEngine(directory, None), params)
        engine = SpeculatingEngine(
            directory, drafting_with(directory), max_num_batched_tokens=num_batched_tokens, block_size=4
        )
        assert run(engine, params) == expected
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_model_that_knows_nothing_changes_no_token(
    params: SamplingParams, other_model: Path, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    expected = run(SpeculatingEngine(directory, None), params)
    engine = SpeculatingEngine(directory, drafting_with(other_model))
    assert run(engine, params) == expected
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens / 2


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_the_smaller_model_may_be_of_another_family(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    engine = SpeculatingEngine(directory, drafting_with(checkpoint(family)))
    assert run(engine, GREEDY) == greedy(directory)
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("cache_tokens", [64, 96, 160])
def test_a_small_cache_costs_drafts_and_no_tokens(cache_tokens: int, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    engine = SpeculatingEngine(directory, drafting_with(directory, cache_tokens=cache_tokens), max_num_seqs=3)
    for _ in range(2):
        assert run(engine, GREEDY) == greedy(directory)
    # What the smaller model still has of a sequence is right, or its drafts would not be.
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


def test_preempted_requests_are_drafted_on_for(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    engine = SpeculatingEngine(directory, drafting_with(directory), block_size=4, num_blocks=28)
    assert run(engine, GREEDY) == greedy(directory)
    assert engine.scheduler.make_stats().num_preemptions > 0
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


def test_a_longer_context_than_the_smaller_model_takes_has_no_drafts(tmp_path: Path, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    short = make_checkpoint("gpt2", tmp_path, n_positions=48)
    engine = SpeculatingEngine(directory, drafting_with(short))
    assert run(engine, GREEDY) == greedy(directory)
    assert engine.stats.num_draft_tokens > 0


def test_a_model_with_another_vocabulary_is_refused(tmp_path: Path, checkpoint: CheckpointOf) -> None:
    other = make_checkpoint("llama", tmp_path, vocab_size=400)
    with pytest.raises(UnsupportedModel, match=r"384 tokens, and this one has 400"):
        SpeculatingEngine(checkpoint("llama"), drafting_with(other))


@pytest.mark.parametrize("settings", [{"method": "draft_model"}, {"method": "ngram", "model": "somewhere"}])
def test_a_smaller_model_and_its_method_go_together(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="needs model"):
        SpeculativeConfig.model_validate(settings)
