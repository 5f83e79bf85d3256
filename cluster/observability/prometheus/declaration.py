"""Declares a metric once: its name, kind, labels, unit and buckets, for the text that Prometheus reads and for docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from prometheus_client.metrics_core import Metric

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
        metric = self._empty()
        for values, value in series:
            metric.add_sample(self.name, dict(zip(self.labels, values, strict=True)), value)
        return metric

    def histograms(self, series: Iterable[tuple[Labels, Histogram]]) -> Metric:
        """Return the metric with these series of a histogram, in which each bucket includes the smaller ones."""
        metric, (bucket, count, total) = self._empty(), self.names
        for values, histogram in series:
            labels = dict(zip(self.labels, values, strict=True))
            for (bound, number), exemplar in zip(histogram.cumulative(), histogram.exemplars(), strict=True):
                metric.add_sample(bucket, {**labels, "le": bound}, number, exemplar=exemplar)
            metric.add_sample(count, labels, histogram.count)
            metric.add_sample(total, labels, histogram.sum)
        return metric

    def _empty(self) -> Metric:
        meaning = f"{self.meaning} Use {self.replaced_by} instead." if self.replaced_by else self.meaning
        return Metric(self.name.removesuffix("_total"), meaning, self.kind.value)


def counter(name: str, meaning: str, *labels: str, unit: str = "", replaced_by: str = "") -> Declaration:
    """Declare a counter."""
    return Declaration(name, Kind.COUNTER, meaning, labels, unit, replaced_by=replaced_by)


def gauge(name: str, meaning: str, *labels: str, unit: str = "") -> Declaration:
    """Declare a gauge."""
    return Declaration(name, Kind.GAUGE, meaning, labels, unit)


def histogram(name: str, meaning: str, *labels: str, unit: str, buckets: tuple[float, ...]) -> Declaration:
    """Declare a histogram."""
    return Declaration(name, Kind.HISTOGRAM, meaning, labels, unit, buckets)
