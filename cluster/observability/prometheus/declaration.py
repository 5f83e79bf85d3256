"""Declares a metric once: its name, kind, labels, unit and buckets, for the text that Prometheus reads and for docs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

from cluster.observability.prometheus.histogram import Histogram


class Kind(StrEnum):
    """The kinds of metrics that Prometheus knows."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Labels: TypeAlias = Sequence[str]
"""The values of a series' labels, in the order of the declaration."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric.

    name:        as queries name it; a counter's ends in _total, and a histogram's has no _bucket
    meaning:     one or two sentences, for the text that Prometheus reads and for docs/metrics.md
    labels:      the labels' names
    unit:        of the values; "" if they count something that the name says
    buckets:     of a histogram: the largest value of each bucket except the last one, in ascending order
    replaced_by: the metric to use instead; this one leaves with the next release. "": it stays
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    replaced_by: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metric's samples."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))

    def one(self, value: float) -> Metric:
        """Return the metric with its only series. value: of the series, which has no labels"""
        return self.of([((), value)])

    def of(self, series: Iterable[tuple[Labels, float]]) -> Metric:
        """Return the metric with these series."""
        return DeclaredMetric(self, [(values, (value,), ()) for values, value in series])

    def histograms(self, series: Iterable[tuple[Labels, Histogram]]) -> Metric:
        """Return the metric with these series of a histogram, in which each bucket includes the smaller ones."""
        return DeclaredMetric(self, [(values, one.values(), one.exemplars()) for values, one in series])

    @property
    def bounds(self) -> list[str]:
        """The bounds of a histogram's buckets as Prometheus writes them."""
        return [*map(str, self.buckets), "+Inf"]


_Series: TypeAlias = tuple[Labels, Sequence[float], Sequence[Exemplar | None]]
"""The values of a series' labels; its value, or those of Histogram.values(); and the examples of buckets, if any."""


class DeclaredMetric(Metric):
    """The series of a declaration as they were at one moment.

    Text is written from them as they are: prometheus_client's objects, two for each sample, are made for those who ask
    for samples.
    """

    def __init__(self, declaration: Declaration, series: Sequence[_Series]) -> None:
        """series: each with as many labels as the declaration has; ValueError is raised otherwise"""
        num_labels = len(declaration.labels)
        if {len(values) for values, _, _ in series} - {num_labels}:
            raise ValueError(f"each series of {declaration.name} needs {num_labels} values of labels")
        meaning, newer = declaration.meaning, declaration.replaced_by
        super().__init__(
            declaration.name.removesuffix("_total"),
            f"{meaning} Use {newer} instead." if newer else meaning,
            declaration.kind.value,
        )
        self.declaration = declaration
        self.series = series

    @property
    def samples(self) -> list[Sample]:
        """The samples of all series."""
        return [sample for one in self.series for sample in self._samples_of(*one)]

    @samples.setter
    def samples(self, empty: list[Sample]) -> None:
        # The base class begins without samples.
        assert not empty, "a declared metric has the samples of its series"

    def _samples_of(
        self, values: Labels, numbers: Sequence[float], exemplars: Sequence[Exemplar | None]
    ) -> Iterator[Sample]:
        labels = dict(zip(self.declaration.labels, values, strict=True))
        if self.declaration.kind is not Kind.HISTOGRAM:
            yield Sample(self.declaration.name, labels, numbers[0])
            return
        bucket, count, total = self.declaration.names
        examples = exemplars or [None] * (len(numbers) - 2)
        for bound, number, exemplar in zip(self.declaration.bounds, numbers[:-2], examples, strict=True):
            yield Sample(bucket, {**labels, "le": bound}, number, None, exemplar)
        yield Sample(count, labels, numbers[-2])
        yield Sample(total, labels, numbers[-1])


def counter(name: str, meaning: str, *labels: str, unit: str = "", replaced_by: str = "") -> Declaration:
    """Declare a counter."""
    return Declaration(name, Kind.COUNTER, meaning, labels, unit, replaced_by=replaced_by)


def gauge(name: str, meaning: str, *labels: str, unit: str = "") -> Declaration:
    """Declare a gauge."""
    return Declaration(name, Kind.GAUGE, meaning, labels, unit)


def histogram(name: str, meaning: str, *labels: str, unit: str, buckets: tuple[float, ...]) -> Declaration:
    """Declare a histogram."""
    return Declaration(name, Kind.HISTOGRAM, meaning, labels, unit, buckets)
