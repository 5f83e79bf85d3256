"""How many tokens are guessed for each running request.

A guess costs its part of a forward, right or wrong. So it is made only as long as it is likely to be right, as the
request's own guesses have fared lately, and only as many are made in one step as the engine can check beside its other
work: with one request running there is room for many, with a full batch for none.
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
"""Per step: what was seen thirty-three steps ago counts a third, so who was given up is tried again in time."""
_PRIOR_TRIED: Final = 2.0
_PRIOR_RIGHT: Final = 1.4


class DraftControl:
    """Chooses numbers of guesses, and learns what became of them.

    Invariant: tried and right belong to the request whose epoch its row has here; for another one they begin anew.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """max_num_seqs, max_num_batched_tokens: of a step"""
        self._config = config
        self._max_num_batched_tokens = max_num_batched_tokens
        self._epochs = np.zeros(max_num_seqs, dtype=np.int64)
        self._tried = np.zeros(max_num_seqs)
        self._right = np.zeros(max_num_seqs)

    def choose(self, rows: RunningRows, batch: StepBatch) -> np.ndarray | None:
        """Return how many tokens to guess for each request of a step after it, [num_requests] int64; None: for nobody.

        Only those that get a token in this step have a next one to guess; the last token they may have is not guessed,
        since the token before it brings it anyway.
        """
        num_running = max(1, len(rows))
        # Nobody's guesses take the token that another one decodes.
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
        # The fuller the step the dearer is a guess, and the surer it must be.
        share = num_running / self._config.max_step_tokens
        min_chance = self._config.min_acceptance + (1 - self._config.min_acceptance) * share
        chosen: np.ndarray = np.minimum(num_possible, self._num_likely(indices, batch.epochs, min_chance))
        return chosen if (chosen > 0).any() else None

    def learn(self, row: int, num_drafted: int, num_accepted: int) -> None:
        """Take in how a request's guesses fared: those after the first wrong one were not really tried."""
        self._tried[row] += min(num_accepted + 1, num_drafted)
        self._right[row] += num_accepted

    def _num_likely(self, indices: np.ndarray, epochs: np.ndarray, min_chance: float) -> np.ndarray:
        """How many guesses in a row are all right with at least this probability."""
        is_known = self._epochs[indices] == epochs
        self._epochs[indices] = epochs
        tried = self._tried[indices] = self._tried[indices] * is_known * _DECAY
        right = self._right[indices] = self._right[indices] * is_known * _DECAY
        chance = (right + _PRIOR_RIGHT) / (tried + _PRIOR_TRIED)
        num_likely = np.log(min_chance) / np.log(np.minimum(chance, 0.99))
        likely: np.ndarray = np.maximum(num_likely, 0).astype(np.int64)
        return likely


def make_draft_control(config: SchedulerConfig) -> DraftControl | None:
    """None if nothing is guessed."""
    if config.speculative is None:
        return None
    return DraftControl(config.speculative, config.max_num_seqs, config.max_num_batched_tokens)


def take_drafts(drafts: DraftTokenIds, rows: RunningRows, grammars: StructuredOutputManager | None) -> None:
    """Let running requests have what was guessed for them, as far as their grammars allow it; others are ignored.

    Where guesses are filled up with NO_TOKEN to a common length, what stands before these counts.
    """
    for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
        request = rows.by_id.get(request_id)
        if request is not None and rows.decodes(request):
            guessed = token_ids[: token_ids.index(NO_TOKEN)] if NO_TOKEN in token_ids else token_ids
            request.spec_token_ids = allowed = cut_drafts(grammars, request, guessed)
            rows.has_drafts[request.row] = bool(allowed)
