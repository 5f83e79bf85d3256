"""The metrics that an ingress gives to Prometheus.

gRPC and HTTP share these metrics: Serving counts requests where they end. Metrics of engines are made from the engines'
newest counters on each scrape; every ingress exports them for all engines, so aggregate them over ingresses by `max`.
prometheus/ has the declarations, and metrics_page.py lists them all.
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from cluster.errors import (
    AllowanceSpent,
    ClusterError,
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidRequest,
    ModelNotFound,
    NoEngineAvailable,
    Overloaded,
    OverloadLimit,
    PermissionDenied,
)
from cluster.observability.load_counts import LoadCounts
from cluster.observability.prometheus.bounded_names import OTHER, BoundedNames
from cluster.observability.prometheus.cluster_figures import collect_cluster
from cluster.observability.prometheus.declaration import counter, gauge
from cluster.observability.prometheus.exposition import to_openmetrics, to_text
from cluster.observability.prometheus.request_figures import AttemptFigures, ModelFigures, collect_models
from cluster.observability.prometheus.routing_metrics import metrics_of_routing
from cluster.observability.routing_figures import RoutingSummary
from cluster.observability.status import ClusterView, RequestTraceView
from cluster.routing.request_record import RequestRecord
from kv_transfer.links.refused_messages import RefusedMessages

MAX_MODELS: Final = 20
"""The base model and its adapters with series of their own; the requests of all further adapters are counted as one."""

_REFUSALS: Final = counter(
    "raypd_refused_requests_total",
    "Requests that were refused before any engine had them. reason: requests, waiting_tokens or memory (the ingress is "
    "at that limit), allowance (the token is at a limit of its own), deadline (the first token would come too late), "
    "no_engine (none serves).",
    "reason",
)
_REASONS: Final = (*OverloadLimit, "allowance", "deadline", "no_engine")
_HTTP: Final = counter(
    "raypd_http_responses_total", "Answers of the HTTP API, by path and status code.", "path", "status"
)
_REFUSED_MESSAGES: Final = counter(
    "raypd_refused_messages_total",
    "Malformed messages that engines sent to this ingress; each one ended a session.",
    "kind",
)
_CERTIFICATE: Final = gauge(
    "raypd_certificate_not_after_timestamp_seconds",
    "Unix time at which the server's certificate in use expires.",
    unit="s",
)
_TRACE_LINES: Final = counter(
    "raypd_request_trace_lines_total",
    "Lines of the request trace that were written, or dropped as the disk was slow or full.",
    "result",
)
_BUILD: Final = gauge("raypd_build_info", "1, with raypd's version and Python's as labels.", "version", "python")
DECLARATIONS: Final = (_REFUSALS, _HTTP, _REFUSED_MESSAGES, _CERTIFICATE, _TRACE_LINES, _BUILD)


class ServingMetrics:
    """The counters and histograms of one ingress, which Serving feeds."""

    def __init__(self, routing: Callable[[], RoutingSummary] = RoutingSummary) -> None:
        """routing: sums up how requests were routed, at any time"""
        self._routing = routing
        self._models: dict[str, ModelFigures] = {}
        self._names = BoundedNames(MAX_MODELS - 1)
        self.base = self._of_name("")
        """The figures of requests without an adapter."""
        self.in_flight = LoadCounts()
        """The requests in flight, which Stopwatch counts."""
        self._attempts = AttemptFigures()
        self._refusals: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self._http: Counter[tuple[str, str]] = Counter()
        self.model_name = "model"
        """The label `model` of requests without an adapter."""
        self.version = ""
        """raypd's version."""
        self.certificate_ends_at_s: Callable[[], float] | None = None
        """Returns the Unix time at which the server's certificate expires; None without TLS."""
        self.request_trace: Callable[[], RequestTraceView] | None = None
        """Returns the counts of the request trace; None if none is written."""
        self.has_traces = False
        """Whether histograms have traces of requests as examples."""
        self.refused_messages = RefusedMessages()
        """Counts the malformed messages that engines send to this ingress."""

    def of_adapter(self, name: str) -> ModelFigures:
        """Return the figures of the requests for an adapter that there is. name: the adapter's; "": no adapter"""
        return self._of_name(self._names.bounded(name)) if name else self.base

    def of_unknown(self) -> ModelFigures:
        """Return the figures of requests whose adapter is not known, and of all adapters beyond MAX_MODELS."""
        return self._of_name(OTHER)

    def _of_name(self, name: str) -> ModelFigures:
        if name not in self._models:
            self._models[name] = ModelFigures()
        return self._models[name]

    def models(self, may_see: Callable[[str], bool] = lambda name: True) -> dict[str, ModelFigures]:
        """Return the figures of each model, by the value of the label `model`.

        may_see: whether the reader may know of an adapter; those that the reader may not know of count as OTHER
        """
        hidden = [name for name in self._models if name not in ("", OTHER) and not may_see(name)]
        models = {name or self.model_name: one for name, one in self._models.items() if name not in hidden}
        if hidden:
            others = [self._models[name] for name in (*hidden, OTHER) if name in self._models]
            models[OTHER] = ModelFigures.merged(others)
        return models

    def on_record(self, record: RequestRecord) -> None:
        """Count the attempts of a request that has ended."""
        self._attempts.add(record)

    def on_error(self, error: BaseException) -> None:
        """Count a request that was refused; other errors are counted as outcomes only."""
        if (reason := _refusal_of(error)) is not None:
            self._refusals[reason] += 1

    def on_http(self, path: str, status: int) -> None:
        """Count an answer to an HTTP call."""
        self._http[path, str(status)] += 1

    def collect(self, may_see: Callable[[str], bool] = lambda name: True) -> Iterator[Metric]:
        """Yield the metrics of what this ingress has served. may_see: as for models()"""
        yield from collect_models(self.models(may_see))
        yield from self._attempts.collect()
        yield _REFUSALS.of(((reason,), count) for reason, count in self._refusals.items())
        yield _HTTP.of(self._http.items())
        yield _REFUSED_MESSAGES.of(((kind,), count) for kind, count in self.refused_messages.counts().items())
        if self.certificate_ends_at_s is not None:
            yield _CERTIFICATE.one(self.certificate_ends_at_s())
        if self.request_trace is not None:
            view = self.request_trace()
            yield _TRACE_LINES.of([(("written",), view.num_lines), (("dropped",), view.num_dropped_lines)])
        yield _BUILD.of([((self.version, platform.python_version()), 1.0)])
        yield from metrics_of_routing(self._routing())


def outcome_of(error: BaseException) -> str:
    """Return the outcome, as in raypd_requests_total, of a request that ended with this error."""
    match error:
        case asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
        case InvalidRequest() | ModelNotFound() | PermissionDenied():
            return "invalid"
        case Overloaded():
            return "overloaded"
        case DeadlineExceeded():
            return "deadline"
        case NoEngineAvailable():
            return "unavailable"
        case ClusterError():
            return "failed"
        case _:
            return "internal"


def _refusal_of(error: BaseException) -> str | None:
    match error:
        case AllowanceSpent():
            return "allowance"
        case Overloaded():
            return error.limit.value
        case DeadlineUnreachable():
            return "deadline"
        case NoEngineAvailable():
            return "no_engine"
        case _:
            return None


def exposition(metrics: ServingMetrics, view: ClusterView, may_see: Callable[[str], bool] = lambda name: True) -> bytes:
    """Return all metrics of an ingress in Prometheus' text format.

    may_see: whether the reader may know of an adapter; other adapters have no series of their own
    """
    return text_of(list(metrics.collect(may_see)), view)


def text_of(served: list[Metric], view: ClusterView, *, has_exemplars: bool = False) -> bytes:
    """Return all metrics of an ingress. May be called from any thread.

    served:        what ServingMetrics.collect() has yielded, which belongs to the ingress's event loop
    has_exemplars: whether the text is in OpenMetrics' format, with the traces that histograms have as examples; else it
                   is in Prometheus' text format
    """
    metrics = [*served, *collect_cluster(view), *ProcessCollector(registry=None).collect()]
    return to_openmetrics(metrics) if has_exemplars else to_text(metrics)
