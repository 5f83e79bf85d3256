"""A part of all requests is traced, beside those that clients ask for up to a rate, and never more than a rate.

Tests of cluster/observability/tracing/span_export.py, cluster/settings/tracing.py.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from cluster.access.trace_context import TraceContext, parse_traceparent
from cluster.observability.metrics import ServingMetrics
from cluster.observability.record_writer import RecordWriter
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.tracing.request_tracing import RateLimit, RequestTracing
from cluster.settings.tracing import TracingConfig

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="it comes with the extra otel")

from cluster.observability.tracing.span_export import SpanExport  # noqa: E402

SAMPLED, UNSAMPLED = (TraceContext(7, 8, is_sampled=flag) for flag in (True, False))


class Traced:
    """A RequestTracing whose spans are kept in memory. now_s: its clock; drawn: the number that it draws"""

    def __init__(self, **settings: float) -> None:
        self.exporter, self.metrics = memory.InMemorySpanExporter(), ServingMetrics()
        config = TracingConfig.model_validate(settings)
        self.now_s, self.drawn = 0.0, 0.5
        self.export = SpanExport(config, "ingress-0", self.exporter)
        self.tracing = RequestTracing(config, self.export, "ingress-0", lambda: self.now_s, lambda: self.drawn)

    def request(self, parent: TraceContext | None = None, error: Exception | None = None) -> str | None:
        """Serve a request; returns the traceparent that its engines get."""
        record = RecordWriter("r", "", arrived_at_s=1000.0, now_s=0.0)
        stopwatch = Stopwatch(lambda: 1.0, self.metrics)
        with (
            suppress(ValueError),
            self.tracing.traced("chat", parent, record, stopwatch),
            stopwatch.counting_the_end(),
        ):
            if error is not None:
                raise error
        return record.traceparent

    def num_traces(self) -> int:
        self.export._provider.force_flush()
        return len(self.exporter.get_finished_spans())


@pytest.mark.parametrize(("drawn", "is_traced"), [(0.0, True), (0.24, True), (0.25, False), (0.99, False)])
def test_a_part_of_all_requests_is_traced(drawn: float, is_traced: bool) -> None:
    one = Traced(sample_ratio=0.25)
    one.drawn = drawn
    assert (one.request() is not None) == is_traced
    assert one.num_traces() == (1 if is_traced else 0)


def test_no_more_than_a_rate_is_traced_whatever_is_drawn() -> None:
    one = Traced(sample_ratio=1.0, max_traces_per_s=2.0)
    assert [one.request() is not None for _ in range(4)] == [True, True, False, False]
    one.now_s = 0.5
    assert [one.request() is not None for _ in range(2)] == [True, False]


def test_a_client_can_ask_for_traces_up_to_a_rate_and_no_further() -> None:
    one = Traced(sample_ratio=0.0, max_client_traces_per_s=1.0)
    headers = [one.request(SAMPLED) for _ in range(3)]
    assert [parse_traceparent(header).is_sampled for header in headers] == [True, False, False]  # type: ignore[union-attr]  # none is malformed
    assert one.num_traces() == 1


def test_a_client_that_does_not_sample_is_traced_like_one_without_a_trace() -> None:
    one = Traced(sample_ratio=0.5)
    one.drawn = 0.9
    assert one.request(UNSAMPLED) == UNSAMPLED.to_header(), "engines learn the trace's id all the same"
    one.drawn = 0.1
    assert parse_traceparent(one.request(UNSAMPLED)).is_sampled  # type: ignore[union-attr]  # none is malformed


def test_only_traced_requests_are_examples_in_the_metrics() -> None:
    one = Traced(sample_ratio=0.0)
    durations = one.metrics.base.histograms["raypd_request_duration_seconds"]
    found = []
    for parent in (UNSAMPLED, SAMPLED):
        one.request(parent)
        shown = [example.labels["trace_id"] for example in durations.exemplars() if example is not None]
        found.append((durations.count, one.metrics.has_traces, shown))
    assert found == [(1, False, []), (2, True, [f"{7:032x}"])]


def test_the_spans_belong_to_the_trace_of_the_client_and_engines_learn_the_span() -> None:
    one = Traced(sample_ratio=0.0)
    header = parse_traceparent(one.request(SAMPLED))
    assert one.num_traces() == 1
    (span,) = one.exporter.get_finished_spans()
    assert header == TraceContext(7, span.context.span_id, is_sampled=True)
    assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (7, 8, True)
    assert span.resource.attributes["service.instance.id"] == "ingress-0"


def test_a_request_that_fails_is_traced_and_its_error_goes_on() -> None:
    one = Traced(sample_ratio=1.0)
    one.request(error=ValueError("a bug"))
    assert one.num_traces() == 1
    (span,) = one.exporter.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code.name) == ("internal", "ERROR")


def test_a_trace_that_cannot_be_made_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Traced(sample_ratio=1.0)
    monkeypatch.setattr(RecordWriter, "record", lambda *_: 1 / 0)
    assert one.request() is not None
    assert "a request's trace cannot be made" in caplog.text


def test_a_rate_of_zero_lets_nothing_pass() -> None:
    limit = RateLimit(0.0, lambda: 1e9)
    assert not limit.take()


def test_a_low_rate_lets_one_event_pass_at_a_time() -> None:
    now_s = [0.0]
    limit = RateLimit(0.5, lambda: now_s[0])
    assert [limit.take(), limit.take()] == [True, False]
    now_s[0] = 2.0
    assert [limit.take(), limit.take()] == [True, False]
