"""The time of one layer's experts (mixture of experts, MoE), by tokens and by how many experts they activate."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats
from cluster.simulation.timing.attention_grid import FAR
from cluster.simulation.timing.op_files import OpPoints, bad_file

EXPERT_KEYS: Final = ("tokens", "activated_experts")
RANK_COLUMN: Final = "ep"
"""The number of ranks that share the experts; the keys of its points are those of one rank. Without it: 1."""


class ExpertTable:
    """Predicts the experts of one layer, in microseconds, on each of some ranks that share them.

    A router of experts that balances its load sends each token to k of E experts, all equally likely, so that T tokens
    activate E * (1 - (1 - k / E)^T) of them on average. E and k are the most experts that the table has, and those of
    a single token. Ranks share the experts (expert parallelism), or each expert (tensor parallelism): either way a rank
    does its part of the work for the tokens of all ranks.
    """

    def __init__(self, path: Path, points: OpPoints, num_ranks: int, *, is_expert_parallel: bool) -> None:
        """Take the points that were measured for so many ranks, or those of one rank that has all experts.

        num_ranks: ranks that share the experts
        Raises InvalidConfig if there are neither, or none for a single token.
        """
        ranks = points.keys[:, -1]
        measured = float(num_ranks) if is_expert_parallel and (ranks == num_ranks).any() else 1.0
        chosen = ranks == measured
        if not chosen.any():
            raise bad_file(path, f"it has points neither for {RANK_COLUMN} {num_ranks} nor for {RANK_COLUMN} 1")
        keys, times_us = points.keys[chosen, :2], points.times_us[chosen]
        is_single = keys[:, 0] == 1
        if not is_single.any():
            raise bad_file(path, "it has no point with one token")
        self._num_ranks, self._is_expert_parallel = num_ranks, is_expert_parallel
        self._is_of_one_rank = measured != 1 or num_ranks == 1
        self._num_chosen, self._num_experts = float(keys[is_single, 1].min()), float(keys[:, 1].max())
        self._rows: list[tuple[float, Floats, Floats]] = []
        for num_activated in np.unique(keys[:, 1]):
            is_row = keys[:, 1] == num_activated
            tokens, times = keys[is_row, 0], times_us[is_row]
            if len(tokens) > 1:
                slope = max(0.0, float(times[-1] - times[0])) / float(tokens[-1] - tokens[0])
                tokens, times = np.append(tokens, FAR), np.append(times, times[-1] + slope * (FAR - tokens[-1]))
            self._rows.append((float(num_activated), tokens, times))

    def layer_us(self, num_tokens: float) -> float:
        """Return the time of a layer in a step. num_tokens: of all ranks together"""
        if num_tokens <= 0:
            return 0.0
        num_activated = self._num_experts * (1 - (1 - self._num_chosen / self._num_experts) ** num_tokens)
        if self._is_of_one_rank:
            return self._look_up(num_tokens, num_activated)
        if self._is_expert_parallel:
            # A rank has its part of the experts, so as many pairs of a token and an expert as so many tokens have.
            return self._look_up(num_tokens / self._num_ranks, num_activated / self._num_ranks)
        return self._look_up(num_tokens, num_activated) / self._num_ranks

    def _look_up(self, num_tokens: float, num_activated: float) -> float:
        index = next((i for i, row in enumerate(self._rows) if row[0] >= num_activated), len(self._rows) - 1)
        upper, tokens, times = self._rows[index]
        upper_us = float(np.interp(num_tokens, tokens, times))
        if index == 0 or num_activated >= upper:
            return upper_us
        lower, tokens, times = self._rows[index - 1]
        lower_us = float(np.interp(num_tokens, tokens, times))
        return lower_us + (upper_us - lower_us) * (num_activated - lower) / (upper - lower)
