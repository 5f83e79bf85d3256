"""The sampling parameters of one step's rows, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules

NO_LOGPROBS: Final = -1
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request whose next token is sampled in this step.

    prompt_token_ids, output_token_ids: int64, the tokens so far
    eos_token_ids: the tokens that end the request unless it ignores them
    rules: the token rules of params, prepared; None if it has none
    """

    params: SamplingParams
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...]
    rules: TokenRules | None = None

    @property
    def suppressed_token_ids(self) -> list[int]:
        """The tokens that must not be sampled yet, because they would end the request before min_tokens."""
        if len(self.output_token_ids) >= self.params.min_tokens:
            return []
        return [*self.eos_token_ids, *self.params.stop_token_ids]


class SamplingTable:
    """The sampling parameters of the persistent batch's rows, [max_num_seqs] each: set once, read in every step."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.changes_logits = np.zeros(max_num_seqs, dtype=bool)

    def set(self, row: int, params: SamplingParams) -> None:
        """Write a request's parameters into its row."""
        self.temperature[row] = params.temperature
        self.seed[row] = params.seed & _SEED_MASK
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.changes_logits[row] = bool(params.logit_bias) or params.has_penalties or params.has_token_rules


class SamplingBatch:
    """The rows of one step, and their sampling parameters as arrays.

    is_plain: every row is greedy and nothing changes its logits, so the argmax is the token
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
        self.row_of = row_of
        self.temperature = table.temperature[rows]
        self.is_random = self.temperature > 0.0
        self.has_changes = table.changes_logits[rows] | (num_output_tokens < table.min_tokens[rows])
        self.num_logprobs = table.num_logprobs[rows]
        self.is_plain = not (self.is_random.any() or self.has_changes.any())
        self._seeds = table.seed[rows]
        self._num_output_tokens = num_output_tokens

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
        return self._seeds, self._num_output_tokens.astype(np.uint64)
