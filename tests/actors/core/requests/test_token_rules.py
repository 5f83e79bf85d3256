"""Tokens that an output must not have, judged against transformers' own processor.

Tests of actors/core/requests/sampling_params.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules

VOCAB_SIZE = 6


def rules(allowed: tuple[int, ...] = (), bad_words: tuple[tuple[int, ...], ...] = ()) -> TokenRules:
    made = TokenRules.of(SamplingParams(allowed_token_ids=allowed, bad_words=bad_words))
    assert made is not None
    return made


def forbidden(made: TokenRules, *output: int) -> set[int]:
    return set(made.forbidden_after(np.array(output, dtype=np.int32)))


def test_a_request_without_rules_has_none() -> None:
    assert TokenRules.of(SamplingParams(logit_bias={3: 1.0})) is None


def test_a_word_of_one_token_never_comes() -> None:
    made = rules(bad_words=((3,), (4,)))

    assert forbidden(made) == forbidden(made, 1, 2) == {3, 4}


def test_the_last_token_of_a_word_does_not_come_after_the_others() -> None:
    made = rules(bad_words=((1, 2, 3), (1, 4), (2, 2)))

    assert forbidden(made) == set()
    assert forbidden(made, 1) == {4}
    assert forbidden(made, 1, 2) == {3, 2}
    assert forbidden(made, 1, 2, 0) == set()
    assert forbidden(made, 5, 1, 2) == {3, 2}


@pytest.mark.parametrize("seed", range(20))
def test_it_forbids_what_transformers_forbids(seed: int) -> None:
    drawn = random.Random(seed)
    words = {tuple(drawn.choices(range(VOCAB_SIZE), k=drawn.randint(1, 4))) for _ in range(drawn.randint(1, 6))}
    output = drawn.choices(range(VOCAB_SIZE), k=drawn.randint(1, 12))
    made = rules(bad_words=tuple(sorted(words)))

    theirs = NoBadWordsLogitsProcessor([list(word) for word in words])(
        torch.tensor([output]), torch.zeros(1, VOCAB_SIZE)
    )

    assert forbidden(made, *output) == set(torch.isinf(theirs[0]).nonzero()[:, 0].tolist())


def test_a_token_that_breaks_a_rule_is_found() -> None:
    made = rules(allowed=(1, 2, 3), bad_words=((1, 2),))

    assert made.find_breach([3, 1, 3], 0) is None
    assert "after 1 tokens" in str(made.find_breach([3, 4], 1))
    assert "after 2 tokens" in str(made.find_breach([3, 1, 2], 2))
    assert made.find_breach([4, 1], 1) is None
