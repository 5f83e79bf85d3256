"""Sampled tokens have the target's distribution, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.requests.sampling_params import SamplingParams
from actors.model.sampling.philox import uniforms
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow
from actors.model.spec_decode.verification import StepDrafts

VOCAB_SIZE = 4
NUM_REQUESTS = 4000
NUM_TOKENS = 3
_CRITICAL_VALUE = 103.4
"""The value of chi squared, with 63 degrees of freedom, that is exceeded once in a thousand times."""


def next_token_logits(seed: int) -> torch.Tensor:
    """[VOCAB_SIZE, VOCAB_SIZE] a model that looks at the last token only."""
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.2


def draft(kind: str, tokens: np.ndarray, num_drafts: int) -> np.ndarray:
    """[NUM_REQUESTS, num_drafts] after tokens [NUM_REQUESTS, so many so far]."""
    if kind == "constant":
        return np.full((NUM_REQUESTS, num_drafts), 2)
    if kind == "other model":
        table = next_token_logits(99).argmax(dim=1).numpy()
        drafts = [table[tokens[:, -1]]]
        for _ in range(num_drafts - 1):
            drafts.append(table[drafts[-1]])
        return np.stack(drafts, axis=1)
    # Drafts that know the very numbers that decide.
    first = tokens.shape[1] - 1
    seeds = np.arange(NUM_REQUESTS, dtype=np.uint64)
    numbers = [uniforms(seeds, np.full(NUM_REQUESTS, first + j, dtype=np.uint64)) for j in range(num_drafts)]
    return (np.stack(numbers, axis=1) * VOCAB_SIZE).astype(np.int64)


def check_once(logits_after: torch.Tensor, tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """One forward for all requests: their new tokens [NUM_REQUESTS, most], filled up with NO_TOKEN."""
    step = StepDrafts(drafts)
    before = np.concatenate([tokens[:, -1:], drafts], axis=1)[step.owners, step.offsets]
    none = np.zeros(0, dtype=np.int64)
    rows = [
        SamplingRow(SamplingParams(seed=owner), none, np.zeros(tokens.shape[1] - 1 + offset, dtype=np.int64), ())
        for owner, offset in zip(step.owners.tolist(), step.offsets.tolist(), strict=True)
    ]
    sampled = sample(logits_after[torch.from_numpy(before)], SamplingBatch.of_rows(rows))
    return step.accept(np.array(sampled.token_ids))[0]


@pytest.mark.parametrize("kind", ["constant", "other model", "same numbers"])
def test_three_tokens_in_a_row_have_the_targets_joint_distribution(kind: str) -> None:
    logits_after = next_token_logits(1)
    outputs: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    # Requests that keep few of their drafts go on alone: here all go on from the shortest's length, again and again.
    for num_done in range(NUM_TOKENS):
        tokens = np.array([[0, *output[:num_done]] for output in outputs])
        for output, new in zip(
            outputs, check_once(logits_after, tokens, draft(kind, tokens, NUM_TOKENS - 1)).tolist(), strict=True
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
