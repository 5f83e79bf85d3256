"""From words to tokens, as vLLM does it, and what is refused because no token would be left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from cluster.parameters.sampling_options import SamplingOptions
from cluster.text.bad_words import check_something_is_left, tokenize_bad_words
from cluster.text.model_tokenizer import ModelTokenizer
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[[str], Path]) -> ModelTokenizer:
    return ModelTokenizer.from_directory(checkpoint("llama"), use_fastokens=True)


def ids(tokenizer: ModelTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.backend.encode(text, add_special_tokens=False).ids)


def test_a_word_is_meant_with_a_space_before_it_and_without(tokenizer: ModelTokenizer) -> None:
    both = (ids(tokenizer, "t"), ids(tokenizer, " t"))
    assert list(map(len, both)) == [1, 1]

    assert tokenize_bad_words(["t"], tokenizer, VOCAB_SIZE) == both
    # Spaces before it are not what is meant.
    assert tokenize_bad_words(["  t"], tokenizer, VOCAB_SIZE) == both


def test_a_space_that_is_a_token_of_its_own_makes_no_other_word(tokenizer: ModelTokenizer) -> None:
    assert len(ids(tokenizer, " D")) == 2

    assert tokenize_bad_words(["D"], tokenizer, VOCAB_SIZE) == (ids(tokenizer, "D"),)


def test_the_same_word_twice_is_one_rule(tokenizer: ModelTokenizer) -> None:
    assert tokenize_bad_words(["D", " D", "D"], tokenizer, VOCAB_SIZE) == (ids(tokenizer, "D"),)


def test_a_word_that_the_model_cannot_say_needs_no_rule(tokenizer: ModelTokenizer) -> None:
    [last] = ids(tokenizer, " t")

    assert tokenize_bad_words(["t", "D"], tokenizer, last) == (ids(tokenizer, "t"), ids(tokenizer, "D"))


@pytest.mark.parametrize(
    ("options", "bad_words", "field"),
    [
        (SamplingOptions(allowed_token_ids=(5, 6), bad_words=("a", "b")), ((5,), (3, 6)), "bad_words"),
        (SamplingOptions(allowed_token_ids=(EOS_TOKEN_ID,), min_tokens=1), (), "allowed_token_ids"),
        (SamplingOptions(allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=2), (), "allowed_token_ids"),
        (SamplingOptions(bad_words=("every",)), tuple((token_id,) for token_id in range(VOCAB_SIZE)), "bad_words"),
    ],
)
def test_rules_that_leave_no_token_are_refused(
    options: SamplingOptions, bad_words: tuple[tuple[int, ...], ...], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_something_is_left(options, bad_words, (EOS_TOKEN_ID,), VOCAB_SIZE)

    assert [violation.field for violation in raised.value.violations] == [f"sampling_params.{field}"]


@pytest.mark.parametrize(
    ("options", "bad_words"),
    [
        (SamplingOptions(), ()),
        (SamplingOptions(allowed_token_ids=(EOS_TOKEN_ID,)), ()),
        (SamplingOptions(allowed_token_ids=(5, 6), min_tokens=3), ((5,), (6, 5))),
        (SamplingOptions(bad_words=("many",)), tuple((token_id,) for token_id in range(VOCAB_SIZE - 1))),
    ],
)
def test_rules_that_leave_one_are_not(options: SamplingOptions, bad_words: tuple[tuple[int, ...], ...]) -> None:
    check_something_is_left(options, bad_words, (EOS_TOKEN_ID,), VOCAB_SIZE)
