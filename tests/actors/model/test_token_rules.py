"""Token rules on logits, and in a batch of requests that have others, or none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow

VOCAB_SIZE = 50
ALLOWED = (3, 8, 9, 30)
BAD_WORDS = ((8,), (4, 9), (1, 4, 3))
OUTPUT = [2, 1, 4]


def row(params: SamplingParams) -> SamplingRow:
    none = np.zeros(0, dtype=np.int64)
    return SamplingRow(params, none, np.array(OUTPUT, dtype=np.int32), (0,), TokenRules.of(params))


def logits_of(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    ("params", "num_possible"),
    [
        (SamplingParams(allowed_token_ids=ALLOWED), 4),
        (SamplingParams(bad_words=BAD_WORDS), VOCAB_SIZE - 3),
        (SamplingParams(allowed_token_ids=ALLOWED, bad_words=BAD_WORDS), 1),
    ],
)
def test_a_row_takes_the_best_token_that_transformers_processors_leave(
    params: SamplingParams, num_possible: int
) -> None:
    logits = logits_of(1)
    scores = logits.clone()
    if params.allowed_token_ids:
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in params.allowed_token_ids]
        scores = SuppressTokensLogitsProcessor(others)(torch.tensor([OUTPUT]), scores)
    if params.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(torch.tensor([OUTPUT]), scores)
    assert int(torch.isfinite(scores).sum()) == num_possible

    for temperature in (0.0, 1.0):
        rows = [row(replace(params, temperature=temperature, seed=seed)) for seed in range(30)]
        tokens = sample(logits.expand(30, -1), SamplingBatch.of_rows(rows)).token_ids
        assert torch.isfinite(scores[0, torch.tensor(tokens)]).all()
        if temperature == 0.0:
            assert set(tokens) == {int(scores.argmax())}


def test_rules_touch_nobody_else_in_the_batch() -> None:
    logits = logits_of(3)
    plain = SamplingParams(temperature=0.0)
    rows = [row(plain), row(replace(plain, allowed_token_ids=(7,))), row(plain)]

    tokens = sample(logits, SamplingBatch.of_rows(rows)).token_ids

    assert tokens == [int(logits[0].argmax()), 7, int(logits[2].argmax())]


def test_no_bias_and_no_penalty_brings_a_forbidden_token_back() -> None:
    params = SamplingParams(
        temperature=0.0,
        allowed_token_ids=ALLOWED,
        bad_words=BAD_WORDS,
        logit_bias={8: 100.0, 20: 100.0},
        repetition_penalty=0.5,
        presence_penalty=-2.0,
    )

    assert sample(logits_of(1), SamplingBatch.of_rows([row(params)])).token_ids == [30]
