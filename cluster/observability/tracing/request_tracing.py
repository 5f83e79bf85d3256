"""Decides which requests of an ingress are traced, and makes their spans when they have ended.

A request that is not traced costs one random number. One that is has a span from its beginning, whose context engines
get with the request; all else is made at its end, from its record. So nothing happens for a token.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from cluster.access.trace_context import TraceContext
from cluster.observability.record_writer import RecordWriter
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.tracing.span_tree import make_span_tree
from cluster.settings.tracing import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from cluster.observability.tracing.span_export import SpanExport

logger = logging.getLogger(__name__)

_BURST_S: Final = 1.0


class RateLimit:
    """Lets so many events pass in each second, and after a pause as many at once as in one second."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * _BURST_S) if per_s else 0.0
        self._left = self._most
        self._clock = clock
        self._at_s = clock()

    def take(self) -> bool:
        """Return whether an event may pass now, and count it if it may."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RequestTracing:
    """The traces of one ingress. It belongs to one event loop."""

    def __init__(
        self,
        settings: TracingConfig,
        export: SpanExport,
        ingress: str,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Trace no request yet.

        ingress: its name
        clock:   monotonic seconds, for the limits
        draw:    returns a number from 0 to 1 (exclusive)
        """
        self._settings = settings
        self._export = export
        self._ingress = ingress
        self._draw = draw
        self._rate = RateLimit(settings.max_traces_per_s, clock)
        self._client_rate = RateLimit(settings.max_client_traces_per_s, clock)

    @contextmanager
    def traced(
        self, operation: str, parent: TraceContext | None, record: RecordWriter, stopwatch: Stopwatch
    ) -> Iterator[None]:
        """Trace a request from here to the end of the context, if it is drawn.

        operation: gen_ai.operation.name
        parent:    what the client's `traceparent` says
        record:    gets the `traceparent` for engines
        stopwatch: has counted the request's end when the context is left
        """
        if not self._is_drawn(parent):
            if parent is not None:
                record.traceparent = TraceContext(parent.trace_id, parent.span_id, is_sampled=False).to_header()
            yield
            return
        span = self._export.begin(parent, int(record.arrived_at_s * 1e9))
        context = span.get_span_context()
        record.traceparent = TraceContext(context.trace_id, context.span_id, is_sampled=True).to_header()
        try:
            yield
        finally:
            self._end(span, operation, record, stopwatch)

    def _end(self, span: Span, operation: str, record: RecordWriter, stopwatch: Stopwatch) -> None:
        try:
            made = record.record(self._ingress, stopwatch)
            self._export.end(span, make_span_tree(made, operation, record.request))
            stopwatch.show_trace(made, f"{span.get_span_context().trace_id:032x}")
        except Exception:
            # Whatever is wrong with a trace, the request must not fail for it.
            logger.exception("a request's trace cannot be made", extra={"request_id": record.request_id})

    def close(self) -> None:
        """Send what is left, for drain_timeout_s at most. This waits, so not on an event loop."""
        self._export.close(self._settings.drain_timeout_s)

    def _is_drawn(self, parent: TraceContext | None) -> bool:
        is_asked_for = parent is not None and parent.is_sampled and self._client_rate.take()
        return (is_asked_for or self._draw() < self._settings.sample_ratio) and self._rate.take()
