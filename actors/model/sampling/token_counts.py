"""Counts the tokens of one request's output, for penalties, a token at a time."""

from __future__ import annotations

from typing import Final

import numpy as np

_FIRST_CAPACITY: Final = 64


class TokenCounts:
    """The distinct tokens of a request, and how often its output has each of them.

    Invariant: the first num_counted tokens of the output are counted, each of them once.
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        """Start before the first output token. prompt_token_ids: [n] integers; the prompt's tokens count 0 times."""
        token_ids = np.unique(prompt_token_ids).astype(np.int64)
        self._size = len(token_ids)
        self._token_ids = np.zeros(self._size + _FIRST_CAPACITY, dtype=np.int64)
        self._token_ids[: self._size] = token_ids
        self._counts = np.zeros_like(self._token_ids)
        self._positions = dict(zip(token_ids.tolist(), range(self._size), strict=True))
        self.num_counted = 0

    def count(self, token_ids: np.ndarray) -> None:
        """Count the next tokens of the output. token_ids: [n] integers"""
        for token_id in token_ids.tolist():
            position = self._positions.setdefault(token_id, self._size)
            if position == self._size:
                self._append(token_id)
            self._counts[position] += 1
        self.num_counted += len(token_ids)

    def with_drafts(self, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens and their counts as they will be after these tokens. Changes nothing.

        drafts: [n] integers
        Returns two arrays [m] int64, which are valid until the next count().
        """
        token_ids, counts = self._token_ids[: self._size], self._counts[: self._size]
        if not len(drafts):
            return token_ids, counts
        counts, new = counts.copy(), dict[int, int]()
        for draft in drafts.tolist():
            position = self._positions.get(draft)
            if position is None:
                new[draft] = new.get(draft, 0) + 1
            else:
                counts[position] += 1
        return np.concatenate([token_ids, list(new)]).astype(np.int64), np.concatenate([counts, list(new.values())])

    def _append(self, token_id: int) -> None:
        if self._size == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[self._size] = token_id
        self._size += 1
