"""A histogram of Prometheus that is filled by one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Self


class Histogram:
    """Counts values by size. Without a lock, observe() takes a third of a microsecond.

    sum: the sum of all values
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket except the last one, in ascending order"""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Self:
        """Return the histogram that another process has counted.

        counts: values in each bucket; missing ones are 0, and those beyond the last bucket are left out
        total:  the sum of all values
        """
        histogram = cls(bounds)
        for index, count in enumerate(counts[: len(bounds) + 1]):
            histogram._counts[index] = count
        histogram.sum = total
        return histogram

    @classmethod
    def merged(cls, bounds: Sequence[float], histograms: Iterable[Histogram]) -> Self:
        """Return the sum of histograms that all have these bounds."""
        whole = cls(bounds)
        for one in histograms:
            whole._counts = [mine + its for mine, its in zip(whole._counts, one._counts, strict=True)]
            whole.sum += one.sum
        return whole

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each bucket's bound, as Prometheus writes it, and how many values are at most as large."""
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield bound, total
