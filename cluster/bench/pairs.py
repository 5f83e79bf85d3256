"""Compares two servers by pairs of runs in turns: ratios within pairs, their median and its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

from cluster.bench.estimates import CONFIDENCE

MIN_PAIRS: Final = 5
"""The fewest pairs of which the smallest and the largest ratio enclose the median with a probability of 90 %."""
PAIRS_SAID: Final = (
    "Each pair is a run of A and one of B with the same requests; pairs begin with A and with B in turns. The interval "
    f"of the median ratio has a confidence of at least {CONFIDENCE:.0%} whatever the ratios' distribution is: its ends "
    "are two of the ratios themselves (sign test)."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of two servers. ratio: the median of B / A over the pairs; low, high: the ends of its interval"""

    median_a: float
    median_b: float
    ratio: float
    low: float
    high: float


def a_is_first(pair: int) -> bool:
    """Whether A is measured first in a pair. The order alternates, so that neither server always comes second."""
    return pair % 2 == 0


def compare(values_a: Sequence[float], values_b: Sequence[float]) -> Comparison:
    """Compare the figures of at least MIN_PAIRS pairs. NaN where a figure is missing or A's is 0."""
    medians = statistics.median(values_a), statistics.median(values_b)
    ratios = [b / a if a else math.nan for a, b in zip(values_a, values_b, strict=True)]
    if any(math.isnan(ratio) for ratio in ratios):
        return Comparison(*medians, math.nan, math.nan, math.nan)
    return Comparison(*medians, statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return a confidence interval of the median of a continuous distribution, given independent values of it.

    The k-th smallest and the k-th largest value enclose the median unless fewer than k values lie on one side of it.
    The number of values on one side is binomial with probability 1/2, so that happens with the probability
    2 * P(Binomial(n, 1/2) < k). k is the largest number with which the interval has the confidence.
    Raises ValueError if the values are too few for it.
    """
    ordered, num_values = sorted(values), len(values)
    missed, num_outside = 0.0, 0
    for k in range(1, (num_values + 1) // 2 + 1):
        missed += 2 * comb(num_values, k - 1) / 2**num_values
        if missed > 1 - confidence:
            break
        num_outside = k
    if num_outside == 0:
        raise ValueError(f"{num_values} values are too few for an interval of {confidence:.0%}")
    return ordered[num_outside - 1], ordered[num_values - num_outside]
