"""Estimates whether fetching a prefix is quicker than computing it, from the times that both have taken so far.

Each time is modelled as a straight line: a start-up cost, and a cost for each token or block. The lines are fitted by
least squares with exponential forgetting (each observation weighs 0.98 of the next one). While a line is not known, a
fetch is tried, so that it becomes known. One in a hundred fetches that the lines advise against is tried as well,
because machines and networks change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.98
"""The weight of an observation relative to the next one: about the last 50 observations count."""
_MIN_OBSERVATIONS: Final = 3
_MAX_DECLINED: Final = 100


@dataclass(slots=True)
class LinearCost:
    """A line that is fitted to observations: seconds = start-up + amount * slope, neither below zero.

    is_start_up: the assumption while all observed amounts are equal: True: all of the time is start-up; False: all of
                 it is proportional to the amount
    """

    is_start_up: bool = False
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _num_observations: int = 0

    def observe(self, amount: float, seconds: float) -> None:
        """Add an observation: something of this amount took so many seconds."""
        self.observe_all(amount, (seconds,))

    def observe_all(self, amount: float, all_seconds: Sequence[float]) -> None:
        """Add observations, the oldest first: each time, something of this amount took so many seconds."""
        weight, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        square = amount * amount
        for seconds in all_seconds:
            weight = weight * _MEMORY + 1.0
            x = x * _MEMORY + amount
            y = y * _MEMORY + seconds
            xx = xx * _MEMORY + square
            xy = xy * _MEMORY + amount * seconds
        self._weight, self._x, self._y, self._xx, self._xy = weight, x, y, xx, xy
        self._num_observations += len(all_seconds)

    def estimate(self, amount: float) -> float | None:
        """Return the seconds for an amount; None before three observations."""
        if self._num_observations < _MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= 1e-9 * max(mean_x * mean_x, 1.0):
            return mean_y if self.is_start_up or mean_x <= 0 else mean_y * amount / mean_x
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        return max(0.0, mean_y - slope * mean_x) + slope * amount


class FetchCost:
    """The costs of fetching and of computing, as one engine has observed them. It belongs to the engine thread."""

    def __init__(self) -> None:
        self._compute = LinearCost()
        # Until enough fetches were observed, fetching counts as cheap, so that fetches of various sizes are tried and
        # observed.
        self._fetch = LinearCost(is_start_up=True)
        self._num_declined = 0

    def observe_steps(self, num_tokens: int, seconds: Sequence[float]) -> None:
        """Note how long steps took that computed so many tokens each, the oldest first."""
        self._compute.observe_all(num_tokens, seconds)

    def observe_fetch(self, num_blocks: int, seconds: float) -> None:
        """Note how long a fetch that brought so many blocks took, from its start to its report."""
        self._fetch.observe(num_blocks, seconds)

    def compute_s(self, num_tokens: int) -> float | None:
        """Return the seconds in which so many tokens are computed; None before three steps."""
        return self._compute.estimate(num_tokens)

    def is_worth_it(self, num_blocks: int, num_spared_tokens: int) -> bool:
        """Return whether to fetch the blocks rather than compute the tokens that the fetch spares."""
        if num_spared_tokens <= 0:
            return False
        fetch_s, compute_s = self._fetch.estimate(num_blocks), self._compute.estimate(num_spared_tokens)
        if fetch_s is None or compute_s is None or fetch_s < compute_s or self._num_declined >= _MAX_DECLINED:
            self._num_declined = 0
            return True
        self._num_declined += 1
        return False
