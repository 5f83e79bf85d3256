"""A histogram of Prometheus that is filled by one thread."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Self

from prometheus_client.samples import Exemplar


class Histogram:
    """Counts values by size. Without a lock, observe() takes a third of a microsecond.

    sum: the sum of all values
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket except the last one, in ascending order"""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
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
        """Return the sum of histograms that all have these bounds, without their examples."""
        whole = cls(bounds)
        for one in histograms:
            whole._counts = [mine + its for mine, its in zip(whole._counts, one._counts, strict=True)]
            whole.sum += one.sum
        return whole

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def show(self, value: float, trace_id: str, at_s: float) -> None:
        """Keep the trace of a request as the example of the bucket that its value is in; the newest one of each bucket.

        value:    has been counted by observe()
        trace_id: 32 hexadecimal digits; at_s: Unix time
        """
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar({"trace_id": trace_id}, value, at_s)

    def exemplars(self) -> list[Exemplar | None]:
        """Return the example of each bucket; None of a bucket without one; nothing if no bucket has one."""
        return [self._exemplars.get(index) for index in range(len(self._counts))] if self._exemplars else []

    def values(self) -> list[float]:
        """Return the values of its series: of the buckets, each with the smaller ones, of the count, and of the sum."""
        counts = list(itertools.accumulate(self._counts))
        return [*counts, counts[-1], self.sum]

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)
