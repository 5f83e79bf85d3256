"""Decides how many tokens to draft for each running request (speculative decoding).

A draft token costs its share of a forward pass, whether it is accepted or not. So a token is drafted only if it is
likely to be accepted, judged by how many of the request's recent draft tokens were. And a step drafts only as many
tokens as the engine can verify beside its other work: many for a single running request, none in a full batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.config import SchedulerConfig, SpeculativeConfig
from actors.core.outputs.model_runner_output import NO_TOKEN, DraftTokenIds
from actors.core.outputs.scheduler_output import StepBatch
from actors.core.requests.running_rows import RunningRows
from actors.core.requests.structured_output import StructuredOutputManager, cut_drafts

_DECAY: Final = 0.97
"""The factor by which old results lose weight at each step: results 33 steps ago count a third.

So a request whose draft tokens were refused gets new ones after a while.
"""
_PRIOR_TRIED: Final = 2.0
_PRIOR_RIGHT: Final = 1.4


class DraftControl:
    """Chooses how many tokens to draft, and learns how many of them were accepted.

    Invariant: the counts of a row belong to the request with the epoch that is stored for the row; when a request with
    another epoch has the row, the counts begin anew.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """max_num_seqs, max_num_batched_tokens: the limits of a step, see SchedulerConfig"""
        self._config = config
        self._max_num_batched_tokens = max_num_batched_tokens
        self._epochs = np.zeros(max_num_seqs, dtype=np.int64)
        self._tried = np.zeros(max_num_seqs)
        self._right = np.zeros(max_num_seqs)

    def choose(self, rows: RunningRows, batch: StepBatch) -> np.ndarray | None:
        """Return how many tokens to draft after a step for each of its requests, [num_requests] int64; None for none.

        Only requests that get a token in the step can have draft tokens. The last token that a request may have is not
        drafted, since the step that verifies the token before it samples it.
        """
        num_running = max(1, len(rows))
        # Draft tokens get only the part of a step that the running requests' own tokens leave.
        num_spare = self._max_num_batched_tokens - num_running
        limit = min(self._config.num_tokens, min(self._config.max_step_tokens, num_spare) // num_running)
        if limit == 0:
            return None
        indices = batch.rows
        num_left = rows.max_num_tokens[indices] - rows.num_expected[indices] - 2
        gets_token = batch.num_computed_tokens + batch.num_new_tokens >= rows.num_expected[indices]
        num_possible = np.where(gets_token & rows.may_draft[indices], np.minimum(num_left, limit), 0)
        if not (num_possible > 0).any():
            return None
        # The fuller the step, the more a draft token costs, and the more likely its acceptance has to be.
        share = num_running / self._config.max_step_tokens
        min_chance = self._config.min_acceptance + (1 - self._config.min_acceptance) * share
        chosen: np.ndarray = np.minimum(num_possible, self._num_likely(indices, batch.epochs, min_chance))
        return chosen if (chosen > 0).any() else None

    def learn(self, row: int, num_drafted: int, num_accepted: int) -> None:
        """Count a request's accepted draft tokens. Those after the first refused one do not count as tried."""
        self._tried[row] += min(num_accepted + 1, num_drafted)
        self._right[row] += num_accepted

    def _num_likely(self, indices: np.ndarray, epochs: np.ndarray, min_chance: float) -> np.ndarray:
        """Return how many draft tokens in a row are all accepted with at least this probability, for each request."""
        is_known = self._epochs[indices] == epochs
        self._epochs[indices] = epochs
        tried = self._tried[indices] = self._tried[indices] * is_known * _DECAY
        right = self._right[indices] = self._right[indices] * is_known * _DECAY
        chance = (right + _PRIOR_RIGHT) / (tried + _PRIOR_TRIED)
        num_likely = np.log(min_chance) / np.log(np.minimum(chance, 0.99))
        likely: np.ndarray = np.maximum(num_likely, 0).astype(np.int64)
        return likely


def make_draft_control(config: SchedulerConfig) -> DraftControl | None:
    """Return the configured control, or None without speculative decoding."""
    if config.speculative is None:
        return None
    return DraftControl(config.speculative, config.max_num_seqs, config.max_num_batched_tokens)


def take_drafts(drafts: DraftTokenIds, rows: RunningRows, grammars: StructuredOutputManager | None) -> None:
    """Give running requests their draft tokens, up to the first one that a request's grammar forbids.

    Requests that do not run are ignored. draft_token_ids may be padded with NO_TOKEN; only the tokens before it count.
    """
    for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
        request = rows.by_id.get(request_id)
        if request is not None and rows.decodes(request):
            drafted = token_ids[: token_ids.index(NO_TOKEN)] if NO_TOKEN in token_ids else token_ids
            request.spec_token_ids = allowed = cut_drafts(grammars, request, drafted)
            rows.has_drafts[request.row] = bool(allowed)
