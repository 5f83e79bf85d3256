"""Prompt lookup: finds an earlier occurrence of a request's last tokens, and drafts the tokens that followed it.

Saxena, "Prompt lookup decoding", 2023; vLLM's method "ngram". The longest n-gram that has occurred before is used, at
its latest occurrence.

Tables with one slot for each hash value keep the position where an n-gram ended last; a later n-gram overwrites the
slot. A slot is only a hint, since the tokens themselves are compared: a collision, or an entry of the row's former
request, costs at most a wrong draft. So the tables are never cleared, and a step's work grows with its new tokens, not
with the context.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.model.input_batch import TokenRows

_SLOTS_PER_TOKEN: Final = 4
_MAX_TABLE_BITS: Final = 16
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


class NgramProposer:
    """Looks n-grams up for all rows together. Implements Proposer.

    Invariant: every n-gram of a row that ends before position num_indexed has been entered; the one that ends at the
    last token never has, so a look-up does not find itself.
    """

    def __init__(self, tokens: TokenRows, *, lookup_min: int, lookup_max: int) -> None:
        """lookup_min, lookup_max: lengths of the n-grams, in tokens."""
        self._tokens = tokens
        self._lengths = np.arange(lookup_max, lookup_min - 1, -1)
        self._back = np.arange(lookup_max)
        self._powers = np.cumprod(np.full(lookup_max, _MULTIPLIER))
        max_num_seqs, max_model_len = tokens.token_ids.shape
        num_bits = min(_MAX_TABLE_BITS, (_SLOTS_PER_TOKEN * int(max_model_len)).bit_length())
        self._shift = np.uint64(64 - num_bits)
        self._ends = np.zeros((max_num_seqs, len(self._lengths), 1 << num_bits), dtype=np.int32)
        self._columns = np.arange(len(self._lengths))
        self._num_indexed = np.zeros(max_num_seqs, dtype=np.int64)
        self._epochs = np.zeros(max_num_seqs, dtype=np.int64)

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        """See Proposer."""
        last = self._tokens.num_tokens[rows] - 1
        self._index(rows, epochs, last)
        grams = self._grams(rows, last)
        ends = self._ends[rows[:, None], self._columns, self._slots(grams)].astype(np.int64)
        is_match = self._is_match(rows, last, ends, grams)
        # The lengths are in descending order, so the first match is the longest.
        best = is_match.argmax(axis=1)
        is_found = is_match.any(axis=1)
        ends = np.where(is_found, ends[np.arange(len(rows)), best], 0)
        return self._continue(rows, last, ends, np.where(is_found, num_wanted, 0))

    def _index(self, rows: np.ndarray, epochs: np.ndarray, last: np.ndarray) -> None:
        """Enter the n-grams of new tokens into the tables, except those that end at the last token."""
        first = np.where(self._epochs[rows] == epochs, self._num_indexed[rows], 0)
        self._epochs[rows], self._num_indexed[rows] = epochs, last
        counts = np.maximum(last - first, 0)
        if not (total := int(counts.sum())):
            return
        owners = np.repeat(rows, counts)
        ends = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        slots = self._slots(self._grams(owners, ends))
        # With equal indices the last assignment wins, which is the latest position.
        self._ends[owners[:, None], self._columns, slots] = ends[:, None]

    def _grams(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the tokens up to these positions, [n, lookup_max], last first; short rows repeat their first token."""
        positions = np.maximum(ends[:, None] - self._back, 0)
        grams: np.ndarray = self._tokens.token_ids[rows[:, None], positions]
        return grams

    def _slots(self, grams: np.ndarray) -> np.ndarray:
        """Return the slot of each length's n-gram in its table, [n, number of lengths] int64."""
        # Sums of the first tokens are the hashes of the shorter n-grams.
        hashes = np.cumsum((grams.astype(np.uint64) + np.uint64(1)) * self._powers, axis=1)
        slots: np.ndarray = (hashes[:, self._lengths - 1] * _MULTIPLIER) >> self._shift
        return slots.astype(np.int64)

    def _is_match(self, rows: np.ndarray, last: np.ndarray, ends: np.ndarray, grams: np.ndarray) -> np.ndarray:
        """Return for each length whether the row's last n-gram equals the one at `ends`: [n, num_lengths] bool."""
        positions = ends[:, :, None] - self._back
        there = self._tokens.token_ids[rows[:, None, None], np.maximum(positions, 0)]
        is_equal = (there == grams[:, None, :]) | (self._back >= self._lengths[:, None])
        is_inside = (ends < last[:, None]) & (ends >= self._lengths - 1)
        is_match: np.ndarray = is_equal.all(axis=2) & is_inside
        return is_match

    def _continue(
        self, rows: np.ndarray, last: np.ndarray, ends: np.ndarray, num_drafts: np.ndarray
    ) -> list[list[int]]:
        """Return the tokens after the matches. At the row's last token, the drafts start again from the match."""
        steps = np.arange(int(num_drafts.max(initial=0)))
        periods = np.maximum(last - ends, 1)
        drafts = self._tokens.token_ids[rows[:, None], ends[:, None] + 1 + steps % periods[:, None]]
        return [row[:count] for row, count in zip(drafts.tolist(), num_drafts.tolist(), strict=True)]
