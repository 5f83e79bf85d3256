"""Counts the steps of an engine by their duration and by their size."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from msgspec import Meta

from kv_transfer.message_ranges import MAX_KINDS, Clock, Total

STEP_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The largest duration of each bucket except the last one."""
STEP_TOKENS: Final = (1.0, 8.0, *(float(1 << power) for power in range(4, 15)))
"""The largest number of tokens of each bucket except the last one."""


@dataclass(slots=True)
class StepStats:
    """The steps that computed tokens, since the engine's start.

    duration_s:      their durations, summed
    num_tokens:      their tokens, summed
    num_by_duration: how many are in each bucket of STEP_SECONDS, and longer than the last one
    num_by_size:     how many are in each bucket of STEP_TOKENS, and larger than the last one
    """

    duration_s: Clock = 0.0
    num_tokens: Total = 0
    num_by_duration: Annotated[list[Total], Meta(max_length=MAX_KINDS)] = field(
        default_factory=lambda: [0] * (len(STEP_SECONDS) + 1)
    )
    num_by_size: Annotated[list[Total], Meta(max_length=MAX_KINDS)] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS) + 1)
    )

    def add(self, duration_s: float, num_tokens: int) -> None:
        """Count a step."""
        self.duration_s += duration_s
        self.num_tokens += num_tokens
        self.num_by_duration[bisect_left(STEP_SECONDS, duration_s)] += 1
        self.num_by_size[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def snapshot(self) -> StepStats:
        """Return a copy that later steps do not change."""
        return replace(self, num_by_duration=list(self.num_by_duration), num_by_size=list(self.num_by_size))
