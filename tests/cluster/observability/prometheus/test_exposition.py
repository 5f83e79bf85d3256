"""Metrics are written as prometheus_client writes them, and readers who ask for it get traces as examples."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser
from prometheus_client.registry import Collector

from cluster.observability.metrics import text_of
from cluster.observability.prometheus.cluster_figures import collect_cluster
from cluster.observability.prometheus.declaration import counter, gauge, histogram
from cluster.observability.prometheus.exposition import TextTemplate, accepts_openmetrics, to_openmetrics, to_text
from cluster.observability.prometheus.histogram import Histogram
from tests.cluster.observability.exposed import VIEW, full_metrics

VALUES = (
    0,
    1,
    -1,
    0.1,
    999_999,
    999_999.5,
    1e6,
    1234567,
    123456789.125,
    1e-9,
    1e21,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
)


def theirs(metrics: Iterable[Metric]) -> bytes:
    class Made(Collector):
        def collect(self) -> Iterable[Metric]:
            return metrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Made())
    return generate_latest(registry)


def families_of(text: str) -> list[Metric]:
    return list(parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]  # it has no annotations


def test_all_metrics_are_written_as_the_library_writes_them() -> None:
    metrics = [*full_metrics().collect(), *collect_cluster(VIEW)]
    assert to_text(metrics) == theirs(metrics)


def test_any_number_and_any_text_is_written_as_the_library_writes_it() -> None:
    hostile = ['a"b', "a\\", "a\nb", 'é"\\\n', "", "}", "x\ry"]
    one = gauge("x", 'With "quotes", a \\ and\na break.', "b", "a").of(
        ((text, str(number)), value) for number, value in enumerate(VALUES) for text in hostile
    )
    metrics = [one, counter("y_total", "Things.").one(3), gauge("z", "Nothing.", "a").of([])]
    assert to_text(metrics) == theirs(metrics)


def test_a_template_takes_any_values() -> None:
    def metrics(values: Iterable[float]) -> list[Metric]:
        several = gauge("x", "A \\ and\na break.", "a").of(((str(n),), one) for n, one in enumerate(values))
        return [gauge("n", "None.", "a").of([]), several, counter("y_total", "One.").one(3), gauge("z", "None.").of([])]

    template = TextTemplate(metrics([0.0] * len(VALUES)))
    assert template.text([*VALUES, 3]) == to_text(metrics(VALUES))
    assert template.text([*VALUES[::-1], 3]) == to_text(metrics(VALUES[::-1]))
    with pytest.raises(ValueError, match="shorter"):
        template.text(VALUES)
    assert TextTemplate([gauge("n", "None.").of([])]).text([]) == to_text([gauge("n", "None.").of([])])


def test_a_bucket_shows_the_newest_trace_of_its_values_and_only_in_the_format_that_can() -> None:
    declared = histogram("x_seconds", "Times.", "model", unit="s", buckets=(0.5, 1.0))
    times = Histogram(declared.buckets)
    for number, value in enumerate((0.25, 0.5, 3.0)):
        times.observe(value)
        times.show(value, f"{number:032x}", 100.0 + number)
    metric = declared.histograms([(("m",), times)])
    (family,) = families_of(to_openmetrics([metric]).decode())
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    shown = {
        one.labels["le"]: (one.exemplar.labels["trace_id"], one.exemplar.value)
        for one in buckets
        if one.exemplar is not None
    }
    assert shown == {"0.5": (f"{1:032x}", 0.5), "+Inf": (f"{2:032x}", 3.0)}
    assert b"trace_id" not in to_text([metric])


def test_the_examples_of_several_models_are_not_told_as_those_of_all() -> None:
    one = Histogram((1.0,))
    one.observe(0.5)
    one.show(0.5, "7" * 32, 1.0)
    assert list(Histogram.merged((1.0,), [one, Histogram((1.0,))]).exemplars()) == []


def test_all_metrics_can_be_told_in_openmetrics_format() -> None:
    text = text_of(list(full_metrics().collect()), VIEW, has_exemplars=True).decode()
    families = {family.name for family in families_of(text)}
    assert {"raypd_requests", "raypd_engine_info", "process_cpu_seconds"} <= families
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("accept", "is_asked_for"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", True),
        ("text/plain, Application/OpenMetrics-Text", True),
        ("text/plain;version=0.0.4", False),
        ("*/*", False),
        ("", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text; q=0.0, text/plain", False),
        (";;,,=;q=", False),
    ],
)
def test_readers_ask_for_openmetrics_by_name(accept: str, is_asked_for: bool) -> None:
    assert accepts_openmetrics(accept) is is_asked_for
