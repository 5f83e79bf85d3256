"""A metric is written as Prometheus reads it, with the labels of its declaration.

Tests of cluster/observability/prometheus/declaration.py and cluster/observability/prometheus/histogram.py.
"""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric

from cluster.observability.prometheus.declaration import counter, gauge, histogram
from cluster.observability.prometheus.exposition import to_text
from cluster.observability.prometheus.histogram import Histogram


def lines(*metrics: Metric) -> list[str]:
    return to_text(metrics).decode().splitlines()


def test_a_counter_has_its_declared_name_and_a_series_for_each_labels() -> None:
    requests = counter("x_total", "Things.", "kind")
    assert lines(requests.of([(("a",), 1), (("b",), 2)])) == [
        "# HELP x_total Things.",
        "# TYPE x_total counter",
        'x_total{kind="a"} 1.0',
        'x_total{kind="b"} 2.0',
    ]


def test_a_counter_that_is_replaced_says_by_what() -> None:
    old = counter("x_total", "Things.", replaced_by="y_seconds")
    assert lines(old.one(3))[0] == "# HELP x_total Things. Use y_seconds instead."


def test_a_series_needs_a_value_for_each_label() -> None:
    with pytest.raises(ValueError, match="needs 2 values of labels"):
        gauge("x", "A thing.", "a", "b").of([(("only one",), 1.0)])


def test_each_bucket_includes_the_smaller_ones() -> None:
    declared = histogram("x_seconds", "Times.", "model", unit="s", buckets=(0.5, 1.0))
    times = Histogram(declared.buckets)
    for value in (0.25, 0.5, 0.75, 3.0):
        times.observe(value)
    assert lines(declared.histograms([(("m",), times)]))[2:] == [
        'x_seconds_bucket{le="0.5",model="m"} 2.0',
        'x_seconds_bucket{le="1.0",model="m"} 3.0',
        'x_seconds_bucket{le="+Inf",model="m"} 4.0',
        'x_seconds_count{model="m"} 4.0',
        'x_seconds_sum{model="m"} 4.5',
    ]
    assert declared.names == ("x_seconds_bucket", "x_seconds_count", "x_seconds_sum")


def test_a_histogram_that_another_process_counted_may_have_any_number_of_buckets() -> None:
    assert Histogram.of((1.0, 2.0), [4, 5, 6, 7], 9.5).values() == [4, 9, 15, 15, 9.5]
    assert Histogram.of((1.0, 2.0), [4], 9.5).values() == [4, 4, 4, 4, 9.5]


def test_histograms_of_several_models_are_added() -> None:
    one, other = Histogram((1.0,)), Histogram((1.0,))
    one.observe(0.5)
    other.observe(4.0)
    whole = Histogram.merged((1.0,), [one, other])
    assert (whole.values(), whole.count) == ([1, 2, 2, 4.5], 2)
    assert one.count == 1
