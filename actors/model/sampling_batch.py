"""The sampling parameters of one step's rows, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.core.sampling_params import SamplingParams

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request whose next token is sampled in this step.

    prompt_token_ids, output_token_ids: int64, the tokens so far
    eos_token_ids: end the request unless it ignores them
    """

    params: SamplingParams
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...]

    @property
    def suppressed_token_ids(self) -> list[int]:
        """Tokens that must not be sampled yet: what would end the request before min_tokens."""
        if len(self.output_token_ids) >= self.params.min_tokens:
            return []
        return [*self.eos_token_ids, *self.params.stop_token_ids]


class SamplingBatch:
    """The rows of one step and, as arrays, what the sampler computes with.

    is_plain: every row is greedy and nothing touches its logits, so an argmax is all
    """

    def __init__(self, rows: list[SamplingRow]) -> None:
        self.rows = rows
        parameters = [row.params for row in rows]
        self.temperature = np.array([params.temperature for params in parameters])
        self.is_random = self.temperature > 0.0
        self.has_changes = np.array([_changes_logits(row) for row in rows], dtype=bool)
        self.num_logprobs = [params.logprobs for params in parameters]
        self.is_plain = not (self.is_random.any() or self.has_changes.any())

    def seeds_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """What decides each row's uniform number, both [n] uint64."""
        seeds = np.array([row.params.seed & _SEED_MASK for row in self.rows], dtype=np.uint64)
        positions = np.array([len(row.output_token_ids) for row in self.rows], dtype=np.uint64)
        return seeds, positions


def _changes_logits(row: SamplingRow) -> bool:
    return bool(row.params.logit_bias or row.params.has_penalties or row.suppressed_token_ids)
