"""An output has the form that was asked for, and is what the model likes best of that form, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason, RequestStatus
from actors.core.requests.sampling_params import SamplingParams, StructuredOutputParams
from tests.actors.test_multi_rank_engine import running
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, random_prompt
from tests.structured import KINDS, compiling_in_process, constrained_tokens

pytestmark = pytest.mark.usefixtures("shared_models")

_Y = 91
"""The only token that begins with a "y"."""
CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 80
PROMPTS = {name: random_prompt(20 + index, seed=index) for index, name in enumerate([*KINDS, "free"])}


@pytest.fixture(autouse=True)
def _no_processes() -> Iterator[None]:
    with compiling_in_process():
        yield


def params_of(name: str) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, structured_output=KINDS.get(name), ignore_eos=name == "free"
    )


def expected_tokens(directory: Path) -> dict[str, list[int]]:
    expected = {
        name: constrained_tokens(directory, PROMPTS[name], params, NUM_TOKENS) for name, params in KINDS.items()
    }
    assert all(tokens[-1] == EOS_TOKEN_ID for tokens in expected.values()), "every form is to be complete"
    return expected | {"free": greedy_tokens(directory, tuple(PROMPTS["free"]), NUM_TOKENS)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_short_of_blocks", [False, True])
def test_handed_over_and_preempted_requests_keep_their_form(
    is_short_of_blocks: bool, overlap: bool, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    prefill = engine_config(directory, block_size=8, overlap=overlap, max_num_batched_tokens=32)
    num_blocks = 17 if is_short_of_blocks else 64
    decode = engine_config(directory, block_size=8, num_blocks=num_blocks, overlap=overlap)
    with EnginePair(prefill, decode) as pair:
        for name, prompt in PROMPTS.items():
            pair.hand_over(name, prompt, params_of(name))
        pair.run()
        assert {name: pair.answers[name].token_ids for name in PROMPTS} == expected_tokens(directory)
        assert (pair.engines["decode"].make_stats().num_preemptions > 0) == is_short_of_blocks
        assert RequestStatus.WAITING_FOR_FSM in pair.seen_statuses
        pair.assert_whole()


def test_a_resumed_request_goes_on_in_the_middle_of_its_form(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = expected_tokens(directory)
    config = engine_config(directory, overlap=True)
    with EnginePair(config, config) as pair:
        for name in KINDS:
            for num_tokens in (1, len(expected[name]) // 2):
                request = EngineCoreRequest(
                    request_id=f"{name}-{num_tokens}",
                    prompt_token_ids=PROMPTS[name],
                    sampling_params=params_of(name),
                    eos_token_ids=(EOS_TOKEN_ID,),
                    output_token_ids=expected[name][:num_tokens],
                    arrival_time_s=time.monotonic(),
                )
                pair.answers[request.request_id] = Answer(token_ids=list(request.output_token_ids))
                pair.engines["decode"].submit(request)
        pair.run()
        for request_id, answer in pair.answers.items():
            assert answer.token_ids == expected[request_id.rpartition("-")[0]], request_id


def test_sampled_output_has_its_form_and_is_the_same_alone_and_in_a_batch(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    sampled = {
        name: replace(params_of(name), temperature=1.3, seed=index, top_p=0.95, presence_penalty=0.5)
        for index, name in enumerate(KINDS)
    }
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        for name, params in sampled.items():
            pair.submit("decode", f"{name}-alone", PROMPTS[name], params, None)
            pair.run()
        for name, params in sampled.items():
            pair.hand_over(name, PROMPTS[name], params)
        pair.run()
        for name in KINDS:
            answer = pair.answers[name]
            assert answer.token_ids == pair.answers[f"{name}-alone"].token_ids
            assert answer.last["decode"].finish_reason is FinishReason.STOP


def test_a_grammar_that_is_wrong_ends_its_request_alone(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        for _ in range(2):
            wrong = replace(params_of("free"), structured_output=StructuredOutputParams("regex", "(a"))
            pair.hand_over("wrong", PROMPTS["free"], wrong)
            pair.hand_over("free", PROMPTS["free"], params_of("free"))
            pair.run()
            for end in pair.answers["wrong"].last.values():
                assert end.finish_reason is FinishReason.ERROR
                assert end.end_cause is EndCause.REQUEST_AT_FAULT
                assert end.error == "Regex parsing error at position 3: The parenthesis is not closed."
            assert pair.answers["free"].token_ids == greedy_tokens(directory, tuple(PROMPTS["free"]), NUM_TOKENS)


@pytest.mark.parametrize(
    ("rules", "num_tokens"),
    [
        ({"allowed_token_ids": (5, EOS_TOKEN_ID)}, 0),
        ({"bad_words": ((_Y,),)}, 0),
        ({"bad_words": ((_Y, _Y),)}, 1),
        ({"allowed_token_ids": (5, _Y)}, 2),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_the_grammar_no_token_end_their_request_alone(
    rules: dict[str, Any], num_tokens: int, temperature: float, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory)
    vocabulary = AutoTokenizer.from_pretrained(directory).get_vocab()
    assert [token_id for text, token_id in vocabulary.items() if text.startswith("y")] == [_Y]
    form = StructuredOutputParams("choice", '["yy"]')
    with EnginePair(config, config) as pair:
        params = replace(params_of("free"), structured_output=form, ignore_eos=False, temperature=temperature, **rules)
        pair.submit("decode", "ruled", PROMPTS["free"], params, None)
        pair.submit("decode", "free", PROMPTS["free"], params_of("free"), None)
        pair.run()
        end = pair.answers["ruled"].last["decode"]
        assert end.finish_reason is FinishReason.ERROR
        assert end.end_cause is EndCause.REQUEST_AT_FAULT
        assert f"after {num_tokens} tokens; grammar, allowed_token_ids and bad_words together allow no token" in str(
            end.error
        )
        assert pair.answers["free"].token_ids == greedy_tokens(directory, tuple(PROMPTS["free"]), NUM_TOKENS)


def test_log_probabilities_are_the_models_own(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory)
    choice = StructuredOutputParams("choice", '["zz"]')
    with EnginePair(config, config) as pair:
        params = replace(params_of("free"), structured_output=choice, logprobs=1, ignore_eos=False)
        pair.submit("decode", "a", PROMPTS["free"], params, None)
        pair.run()
        logprobs = pair.answers["a"].last["decode"].logprobs
        assert logprobs is not None
        assert logprobs[-1].rank > 1, "the model would have gone on"


def test_all_ranks_of_an_engine_sample_under_the_grammar(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), PROMPTS["regex"]
    *expected, end = constrained_tokens(directory, prompt, KINDS["regex"], NUM_TOKENS)
    assert end == EOS_TOKEN_ID
    with running(directory, RankThreads, size=2, overlap=True) as engine:
        assert engine.generate(prompt, len(expected), structured_output=KINDS["regex"]) == expected
