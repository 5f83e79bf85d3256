"""Follows one request's output through its grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import xgrammar

from actors.model.grammar.token_text import TokenTexts

_GRACE_S: Final = 2.0
EVERY_TOKEN: Final = -1


class TokenMatcher:
    """Knows which tokens a request's grammar allows next.

    Invariant: the matcher has accepted exactly the output tokens that the scheduler has appended to the request. Its
    state depends on the grammar and on these tokens only.
    """

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, texts: TokenTexts, *, is_json: bool, max_seconds_per_token: float
    ) -> None:
        """Start before the first output token.

        texts: what UTF-8 and JSON forbid beside the grammar
        is_json: the grammar describes JSON, so tokens that JSON cannot contain are forbidden
        max_seconds_per_token: accept() refuses an output whose matching takes longer than this on average
        """
        self._texts = texts
        self._json_mask = texts.json_mask if is_json else None
        self._utf8_mask: np.ndarray | None = None
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._max_seconds_per_token = max_seconds_per_token
        self._num_tokens = 0
        self._spent_s = 0.0

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Advance by these tokens. Returns None, or the reason why the output cannot go on."""
        began_s = time.perf_counter()
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                return f"the grammar does not allow token {token_id} after {self._num_tokens} tokens"
            self._num_tokens += 1
            self._utf8_mask = self._texts.mask_after(token_id)
            self._spent_s += -began_s + (began_s := time.perf_counter())
            if self._spent_s > _GRACE_S + self._max_seconds_per_token * self._num_tokens:
                return f"the grammar is too ambiguous: following {self._num_tokens} tokens took {self._spent_s:.1f} s"
        return None

    def count_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many draft tokens are allowed, up to the first one that is not. Changes nothing."""
        began_s = time.perf_counter()
        num_allowed = 0
        while num_allowed < len(drafts) and self._try(drafts[num_allowed]):
            num_allowed += 1
        self._matcher.rollback(num_allowed)
        self._spent_s += time.perf_counter() - began_s
        return num_allowed

    def fill(self, bits: np.ndarray, row: int, drafts: Sequence[int] = ()) -> None:
        """Write which tokens are allowed next into a row, and into the rows after it what is allowed after each draft.

        bits: [num_rows, ceil(vocab_size / 32)] int32, 1 for an allowed token, the lowest bit first
        drafts: draft tokens; the rows after a draft token that is not allowed get EVERY_TOKEN
        """
        began_s = time.perf_counter()
        num_allowed = 0
        self._fill_row(bits, row, self._utf8_mask)
        for draft in drafts:
            if not self._try(draft):
                bits[row + num_allowed + 1 : row + len(drafts) + 1] = EVERY_TOKEN
                break
            num_allowed += 1
            self._fill_row(bits, row + num_allowed, self._texts.mask_after(draft))
        self._matcher.rollback(num_allowed)
        self._spent_s += time.perf_counter() - began_s

    def _try(self, draft: int) -> bool:
        """Advance by a draft token if it is allowed, and return whether it is. The caller must roll back."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(draft))

    def _fill_row(self, bits: np.ndarray, row: int, utf8_mask: np.ndarray | None) -> None:
        if self._matcher.is_terminated():
            # A request that ignores the end-of-sequence token may go on after its grammar has ended.
            bits[row] = EVERY_TOKEN
            return
        self._matcher.fill_next_token_bitmask(bits, row)
        for mask in (utf8_mask, self._json_mask):
            if mask is not None:
                bits[row] &= mask
