"""Gives metrics that are made already to Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Collected(Collector):
    """Metrics that are made already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """metrics: each name once"""
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics
