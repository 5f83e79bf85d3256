"""Sends spans to an OpenTelemetry collector, by OTLP over HTTP, from a thread of OpenTelemetry's SDK.

This is the only module that imports OpenTelemetry, and only an ingress that traces imports it. The event loop appends
spans to a bounded queue, from which the oldest are dropped: a collector that is slow or away costs it nothing. A change
of whether the collector takes spans is logged once; the SDK's own log lines, one for each batch, are left out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from cluster.access.trace_context import TraceContext
from cluster.observability.tracing.span_tree import SpanNode
from cluster.settings.tracing import TracingConfig

logger = logging.getLogger(__name__)

_SCOPE: Final = "raypd"
_EXPORT_TIMEOUT_S: Final = 10.0
_DELAY_S: Final = 5.0
"""The longest time that a span waits for others before they are sent, as is OpenTelemetry's default.

A message to the collector costs the process 3 ms.
"""
_BATCH: Final = 256
_NOISY: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common",
    "opentelemetry.sdk._shared_internal",
)


class SpanExport:
    """The spans of one ingress. Everything but close() is for the event loop."""

    def __init__(self, settings: TracingConfig, ingress: str, exporter: SpanExporter | None = None) -> None:
        """Start the SDK's thread.

        ingress:  its name, the instance of the service
        exporter: receives the spans; None: one for the settings' endpoint
        """
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = exporter or trace_exporter.OTLPSpanExporter(settings.endpoint, timeout=_EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": settings.service_name, "service.instance.id": ingress})
        # The sampling is decided before; nothing at exit may wait for the collector.
        self._provider = sdk.TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Watched(self._exporter, settings.endpoint),
                max_queue_size=settings.max_queued_spans,
                schedule_delay_millis=_DELAY_S * 1000,
                max_export_batch_size=min(_BATCH, settings.max_queued_spans),
            )
        )
        self._tracer = self._provider.get_tracer(_SCOPE)

    def begin(self, parent: TraceContext | None, began_ns: int) -> trace.Span:
        """Begin the span of a request. parent: the span of the client, if it has one"""
        return self._tracer.start_span(
            "request", context=_context_of(parent), kind=trace.SpanKind.SERVER, start_time=began_ns
        )

    def end(self, span: trace.Span, tree: SpanNode) -> None:
        """Give a request's span its name and its attributes, end it, and make the spans below it."""
        span.update_name(tree.name)
        span.set_attributes(dict(tree.attributes))
        self._finish(span, tree)

    def close(self, timeout_s: float) -> None:
        """Send what is queued, and stop; give up after timeout_s. This waits, so not on an event loop."""
        # The SDK's own shutdown waits up to 30 s. Daemon: nor must it keep the process from its end.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()

    def _finish(self, span: trace.Span, node: SpanNode) -> None:
        for event in node.events:
            span.add_event(event.name, dict(event.attributes), event.at_ns)
        if node.error:
            span.set_status(trace.StatusCode.ERROR, node.error)
        within = trace.set_span_in_context(span, Context())
        contexts: list[trace.SpanContext] = []
        for child in node.children:
            links = [] if child.follows is None else [trace.Link(contexts[child.follows])]
            made = self._tracer.start_span(
                child.name, within, attributes=dict(child.attributes), links=links, start_time=child.began_ns
            )
            contexts.append(made.get_span_context())
            self._finish(made, child)
        span.end(node.ended_ns)


class _Watched(SpanExporter):
    """An exporter that logs when the collector stops to take spans, and when it takes them again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[sdk.ReadableSpan]) -> SpanExportResult:
        """Send spans; spans that cannot be sent are lost."""
        reason = "see the collector's log"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            # Whatever is wrong with a collector's answer, traces must not end the thread.
            result, reason = SpanExportResult.FAILURE, repr(error)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning(
                "the collector takes no traces: spans are dropped", extra={"endpoint": self._endpoint, "reason": reason}
            )
        elif self._is_failing and not is_failing:
            logger.info("the collector takes traces again", extra={"endpoint": self._endpoint})
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """Stop the exporter; a retry that waits is given up."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return whether everything was sent; the exporter keeps nothing."""
        return self._exporter.force_flush(timeout_millis)


def _context_of(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    # The trace's own sampling is ours to decide, so the parent counts as sampled.
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    remote = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())
