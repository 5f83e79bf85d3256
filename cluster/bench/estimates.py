"""Percentiles, means and their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

CONFIDENCE: Final = 0.90
NUM_RESAMPLES: Final = 1000
MAX_RESAMPLED: Final = 200_000
"""The most values of a resample."""
INTERVALS_SAID: Final = (
    f"Intervals are {CONFIDENCE:.0%} percentile bootstrap intervals: {NUM_RESAMPLES} times, as many requests as the "
    "run had are drawn from it with replacement (seeded), each with all its gaps, and the figure is computed again. "
    "They say how well this run's requests determine the figure, not how far another run would be from it: for that, "
    "use --pair."
)
_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """The figures of one metric.

    num_values:  how many values there were
    percentiles: by percent, such as 50.0
    """

    num_values: int
    mean: Estimate
    std: float
    percentiles: dict[float, Estimate]

    def is_thin(self, percent: float) -> bool:
        """Whether fewer than five values lie beyond a percentile, so that single ones decide it."""
        return self.num_values * min(percent, 100 - percent) / 100 < 5


def percentile(values: Sequence[float] | _Floats, percent: float) -> float:
    """Return a percentile, with linear interpolation between values as numpy and vLLM do; NaN without values."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


def distribution_of(values_by_request: Sequence[Sequence[float]], percents: Sequence[float], seed: int) -> Distribution:
    """Describe the values of a metric, of which each request has one (TTFT) or several (ITL), or none.

    Resamples draw requests, not values: gaps of one request are alike, and as single values they would make the
    intervals too narrow. Where there are more than MAX_RESAMPLED values, the intervals (not the figures) are computed
    on every k-th of them in the order of their size.
    """
    counts = np.array([len(values) for values in values_by_request], dtype=np.int64)
    values = np.concatenate([np.asarray(values, dtype=np.float64) for values in values_by_request] or [np.zeros(0)])
    if not len(values):
        nothing = Estimate(math.nan, math.nan, math.nan)
        return Distribution(0, nothing, math.nan, dict.fromkeys(percents, nothing))
    owners = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(values, kind="stable")
    figures = [float(values.mean()), *(float(figure) for figure in np.percentile(values, list(percents)))]
    step = -(-len(values) // MAX_RESAMPLED)
    chosen = order[step // 2 :: step]
    resampled = _resample(values[chosen], owners[chosen], len(counts), percents, np.random.default_rng(seed))
    tail = 50 * (1 - CONFIDENCE)
    lows, highs = np.percentile(resampled, [tail, 100 - tail], axis=0)
    mean, *rest = (
        Estimate(figure, float(low), float(high)) for figure, low, high in zip(figures, lows, highs, strict=True)
    )
    return Distribution(len(values), mean, float(values.std()), dict(zip(percents, rest, strict=True)))


def _resample(
    values: _Floats, owners: _Ints, num_requests: int, percents: Sequence[float], rng: np.random.Generator
) -> _Floats:
    """Return the mean and the percentiles of each resample: [num_resamples, 1 + len(percents)].

    values: [n], ascending; owners: [n], the number of the request that each value belongs to
    """
    figures: list[list[float]] = []
    fractions = np.asarray(percents, dtype=np.float64) / 100
    while len(figures) < NUM_RESAMPLES:
        drawn = np.bincount(rng.integers(0, num_requests, num_requests), minlength=num_requests)
        weights = drawn[owners]
        ends = np.cumsum(weights)
        if ends[-1] == 0:
            continue  # All requests that were drawn have no values.
        # Value number k of the resample, in ascending order, is the first whose weights up to it exceed k.
        positions = fractions * (ends[-1] - 1)
        whole = np.floor(positions)
        low = values[np.searchsorted(ends, whole, side="right")]
        high = values[np.searchsorted(ends, np.ceil(positions), side="right")]
        figures.append([float(weights @ values / ends[-1]), *(low + (positions - whole) * (high - low))])
    return np.array(figures)
