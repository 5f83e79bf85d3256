"""Whether a prefix is quicker fetched or computed, from what both have taken so far.

Both times are straight lines in their amounts, fitted to what was seen by least squares that forget: a start-up cost
and a cost per token or block. Until a line is known, a fetch is tried: that is how it becomes known. It is tried once
in a while when the lines speak against it, too, for machines and networks change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.98
"""Weight of an observation relative to the next one: about the last 50 count."""
_MIN_OBSERVATIONS: Final = 3
_MAX_DECLINED: Final = 100


@dataclass(slots=True)
class LinearCost:
    """seconds = start-up + amount * slope, neither below zero.

    is_start_up: what to think while all amounts seen are alike: that the time is all start-up, or else all slope
    """

    is_start_up: bool = False
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _num_observations: int = 0

    def observe(self, amount: float, seconds: float) -> None:
        """Something of this amount took so long."""
        self._weight = self._weight * _MEMORY + 1.0
        self._x = self._x * _MEMORY + amount
        self._y = self._y * _MEMORY + seconds
        self._xx = self._xx * _MEMORY + amount * amount
        self._xy = self._xy * _MEMORY + amount * seconds
        self._num_observations += 1

    def estimate(self, amount: float) -> float | None:
        """Seconds for this amount; None until enough has been seen."""
        if self._num_observations < _MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= 1e-9 * max(mean_x * mean_x, 1.0):
            return mean_y if self.is_start_up or mean_x <= 0 else mean_y * amount / mean_x
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        return max(0.0, mean_y - slope * mean_x) + slope * amount


class FetchCost:
    """Belongs to the engine thread."""

    def __init__(self) -> None:
        self._compute = LinearCost()
        # The hopeful guess: so other amounts are tried as well, and the line becomes known.
        self._fetch = LinearCost(is_start_up=True)
        self._num_declined = 0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        self._compute.observe(num_tokens, seconds)

    def observe_fetch(self, num_blocks: int, seconds: float) -> None:
        """A fetch brought so many blocks, from its start to its report."""
        self._fetch.observe(num_blocks, seconds)

    def is_worth_it(self, num_blocks: int, num_spared_tokens: int) -> bool:
        """Whether fetching the blocks is quicker than computing the tokens that it spares."""
        if num_spared_tokens <= 0:
            return False
        fetch_s, compute_s = self._fetch.estimate(num_blocks), self._compute.estimate(num_spared_tokens)
        if fetch_s is None or compute_s is None or fetch_s < compute_s or self._num_declined >= _MAX_DECLINED:
            self._num_declined = 0
            return True
        self._num_declined += 1
        return False
