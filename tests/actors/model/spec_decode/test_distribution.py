"""Sampled tokens have the target's distribution, whatever is guessed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.requests.sampling_params import SamplingParams
from actors.model.sampling.philox import uniforms
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch, SamplingRow
from actors.model.spec_decode.verification import StepDrafts

VOCAB_SIZE = 4
NUM_REQUESTS = 4000
NUM_TOKENS = 3
_CRITICAL_VALUE = 103.4
"""The value of chi squared, with 63 degrees of freedom, that is exceeded once in a thousand times."""


def next_token_logits(seed: int) -> torch.Tensor:
    """[VOCAB_SIZE, VOCAB_SIZE] a model that looks at the last token only."""
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.2


def guess(kind: str, tokens: np.ndarray, num_guesses: int) -> np.ndarray:
    """[NUM_REQUESTS, num_guesses] after tokens [NUM_REQUESTS, so many so far]."""
    if kind == "constant":
        return np.full((NUM_REQUESTS, num_guesses), 2)
    if kind == "other model":
        table = next_token_logits(99).argmax(dim=1).numpy()
        guesses = [table[tokens[:, -1]]]
        for _ in range(num_guesses - 1):
            guesses.append(table[guesses[-1]])
        return np.stack(guesses, axis=1)
    # Guesses that know the very numbers that decide.
    first = tokens.shape[1] - 1
    seeds = np.arange(NUM_REQUESTS, dtype=np.uint64)
    numbers = [uniforms(seeds, np.full(NUM_REQUESTS, first + j, dtype=np.uint64)) for j in range(num_guesses)]
    return (np.stack(numbers, axis=1) * VOCAB_SIZE).astype(np.int64)


def check_once(logits_after: torch.Tensor, tokens: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """One forward for all requests: their new tokens [NUM_REQUESTS, most], filled up with NO_TOKEN."""
    drafts = StepDrafts(guesses)
    before = np.concatenate([tokens[:, -1:], guesses], axis=1)[drafts.owners, drafts.offsets]
    none = np.zeros(0, dtype=np.int64)
    rows = [
        SamplingRow(SamplingParams(seed=owner), none, np.zeros(tokens.shape[1] - 1 + offset, dtype=np.int64), ())
        for owner, offset in zip(drafts.owners.tolist(), drafts.offsets.tolist(), strict=True)
    ]
    sampled = sample(logits_after[torch.from_numpy(before)], SamplingBatch.of_rows(rows))
    return drafts.accept(np.array(sampled.token_ids))[0]


@pytest.mark.parametrize("kind", ["constant", "other model", "same numbers"])
def test_three_tokens_in_a_row_have_the_targets_joint_distribution(kind: str) -> None:
    logits_after = next_token_logits(1)
    outputs: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    # Requests that keep few of their guesses go on alone: here all go on from the shortest's length, again and again.
    for num_done in range(NUM_TOKENS):
        tokens = np.array([[0, *output[:num_done]] for output in outputs])
        for output, new in zip(
            outputs, check_once(logits_after, tokens, guess(kind, tokens, NUM_TOKENS - 1)).tolist(), strict=True
        ):
            kept = [token for token in new if token != NO_TOKEN]
            # What is sampled again at a position is the same.
            assert output[num_done:] == kept[: len(output) - num_done]
            output[num_done:] = kept if len(kept) > len(output) - num_done else output[num_done:]

    counts = np.zeros((VOCAB_SIZE,) * NUM_TOKENS)
    for output in outputs:
        counts[tuple(output[:NUM_TOKENS])] += 1
    after = torch.softmax(logits_after, dim=1).numpy()
    expected = NUM_REQUESTS * np.einsum("a,ab,bc->abc", after[0], after, after)
    assert expected.min() > 1
    assert ((counts - expected) ** 2 / expected).sum() < _CRITICAL_VALUE
