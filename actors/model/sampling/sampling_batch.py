"""The sampling parameters of one step's rows, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from actors.core.requests.sampling_params import SamplingParams
from actors.model.sampling.filters import Filters
from actors.model.sampling.logit_changes import RowChanges
from actors.model.sampling.sampling_row import SamplingRow

NO_LOGPROBS: Final = -1
_SEED_MASK = (1 << 64) - 1


class SamplingTable:
    """The sampling parameters of the persistent batch's rows, [max_num_seqs] each: set once, read in every step.

    changes: by row, what the request changes in its logits; made when the row is first sampled
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs)
        self.log_min_p = np.full(max_num_seqs, -np.inf, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.changes_logits = np.zeros(max_num_seqs, dtype=bool)
        self.changes: dict[int, RowChanges] = {}

    def set(self, row: int, params: SamplingParams) -> None:
        """Write a request's parameters into its row."""
        self.clear(row)
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.log_min_p[row] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.seed[row] = params.seed & _SEED_MASK
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.changes_logits[row] = bool(params.logit_bias) or params.has_penalties or params.has_token_rules

    def clear(self, row: int) -> None:
        """Drop what is kept for the row's request, because it has left the row."""
        self.changes.pop(row, None)


class SamplingBatch:
    """The rows of one step, and their sampling parameters as arrays.

    is_plain: every row is greedy, nothing changes its logits and no log-probabilities are wanted: the argmax is all
    num_logprobs: per row, NO_LOGPROBS where none are wanted
    """

    def __init__(
        self,
        table: SamplingTable,
        rows: np.ndarray,
        num_output_tokens: np.ndarray,
        row_of: Callable[[int], SamplingRow],
    ) -> None:
        """Select rows of the table.

        rows, num_output_tokens: [n] int64
        row_of: makes the SamplingRow of an index into rows; called only for rows that need more than the arrays
        """
        self._table = table
        self._rows = rows
        self.row_of = row_of
        self.temperature = table.temperature[rows]
        self.is_random = self.temperature > 0.0
        self.has_changes = table.changes_logits[rows] | (num_output_tokens < table.min_tokens[rows])
        self.num_logprobs = table.num_logprobs[rows]
        wants_logprobs = self.num_logprobs > NO_LOGPROBS
        self.is_plain = not (self.is_random | self.has_changes | wants_logprobs).any()
        self._num_output_tokens = num_output_tokens

    def __len__(self) -> int:
        return len(self._rows)

    @classmethod
    def of_rows(cls, rows: Sequence[SamplingRow]) -> SamplingBatch:
        """Make a batch of rows that stand in no table."""
        table = SamplingTable(len(rows))
        for index, row in enumerate(rows):
            table.set(index, row.params)
        num_output_tokens = np.array([len(row.output_token_ids) for row in rows], dtype=np.int64)
        return cls(table, np.arange(len(rows)), num_output_tokens, rows.__getitem__)

    def seeds_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seed and the position that decide each row's uniform number, both [n] uint64."""
        return self._table.seed[self._rows], self._num_output_tokens.astype(np.uint64)

    def filters(self, indices: np.ndarray) -> Filters:
        """Return the filters of some of the rows. indices: [m] int64, into the batch"""
        rows, table = self._rows[indices], self._table
        return Filters(table.top_k[rows], table.top_p[rows], table.log_min_p[rows])

    def changes(self, index: int, vocab_size: int) -> tuple[RowChanges, SamplingRow]:
        """Return what the request at this index changes in its logits, and its tokens.

        vocab_size: how many logits a row has
        """
        row, number = self.row_of(index), int(self._rows[index])
        changes = self._table.changes.get(number)
        if changes is None:
            changes = self._table.changes[number] = RowChanges(row, vocab_size)
        return changes, row
