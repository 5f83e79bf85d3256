"""Verifies drafts.

A drafted position is sampled like any other: from the target's own logits there, with the uniform number of the
request's seed and that output position. A draft is right if it is that very token, and the first wrong one is replaced
by it. So the tokens are those that would have been sampled one by one, greedy or not, and nothing about their
distribution needs a proof (docs/decisions/0017).
"""

from __future__ import annotations

import numpy as np

from actors.core.outputs.model_runner_output import NO_TOKEN


class StepDrafts:
    """The drafts of one step, and the positions at which it samples: after each request's last token and each draft.

    token_ids: [num_requests, most drafts] int64, filled up with NO_TOKEN; for the requests that sample in the step
    owners:    [num_positions] int64, the request that each position belongs to
    offsets:   [num_positions] int64, how many of the request's drafts come before each position
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self._num_drafts = (token_ids != NO_TOKEN).sum(axis=1)
        counts = self._num_drafts + 1
        self.owners = np.repeat(np.arange(len(counts)), counts)
        self.offsets = np.arange(len(self.owners)) - np.repeat(np.cumsum(counts) - counts, counts)

    def positions_before(self, ends: np.ndarray) -> np.ndarray:
        """Return the positions in the flattened batch, [num_positions] int64.

        ends: [num_requests] int64, the position of each request's last token or draft
        """
        positions: np.ndarray = (ends - self._num_drafts)[self.owners] + self.offsets
        return positions

    def accept(self, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep each request's tokens up to the first that differs from its draft.

        sampled: [num_positions] int64, the target's tokens
        Returns the tokens [num_requests, most drafts + 1], filled up with NO_TOKEN, and how many each request has.
        """
        num_requests, num_columns = self.token_ids.shape[0], self.token_ids.shape[1] + 1
        tokens = np.full((num_requests, num_columns), NO_TOKEN, dtype=np.int64)
        tokens[self.owners, self.offsets] = sampled
        # After a request's last draft comes a token without a draft, which counts as different.
        is_right = tokens[:, :-1] == self.token_ids
        num_tokens: np.ndarray = np.cumprod(is_right, axis=1).sum(axis=1) + 1
        tokens[np.arange(num_columns) >= num_tokens[:, None]] = NO_TOKEN
        return tokens, num_tokens
