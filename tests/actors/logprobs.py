"""Log-probabilities as transformers' own logits have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.core.outputs.model_runner_output import TokenLogprobs
from tests.reference import logprobs_after


def assert_are_the_models(
    logprobs: Sequence[TokenLogprobs] | None, directory: Path, token_ids: Sequence[int], first: int, num_top: int
) -> None:
    """Check the entries of token_ids from index first on, one by one, with so many of the most likely tokens."""
    assert logprobs is not None
    assert len(logprobs) == len(token_ids) - first
    expected = logprobs_after(directory, tuple(token_ids))
    for place, ours in enumerate(logprobs, first):
        theirs = expected[place - 1]
        top = theirs.topk(num_top)
        assert ours.token_ids == [token_ids[place], *top.indices.tolist()], place
        assert ours.logprobs == pytest.approx([theirs[token_ids[place]].item(), *top.values.tolist()], abs=2e-4)
        assert ours.rank == int((theirs > theirs[token_ids[place]]).sum()) + 1
