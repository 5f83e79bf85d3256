"""Defines every metric that an ingress gives to Prometheus.

gRPC and HTTP share these metrics: Serving counts requests where they end. Metrics of engines are made from the engines'
newest counters on each scrape; every ingress exports them for all engines, so aggregate them over ingresses by `max`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.errors import (
    ClusterError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoEngineAvailable,
    Overloaded,
    PermissionDenied,
)
from cluster.observability.plan_metrics import metrics_of_plan
from cluster.observability.routing_figures import WAYS, WINDOW_S, RoutingSummary
from cluster.observability.status import ClusterView, EngineView, RequestTraceView
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.transfer_stats import TransferStats

_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_E2E_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """A histogram of Prometheus for use by one thread; without a lock, observe() takes a third of a microsecond."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket except the last one, in ascending order"""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, documentation: str) -> Metric:
        """Return the histogram in Prometheus' form, in which each bucket includes the smaller ones."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class ServingMetrics:
    """The counters and histograms of one ingress, which Serving feeds."""

    def __init__(self, routing: Callable[[], RoutingSummary] = RoutingSummary) -> None:
        """routing: sums up how requests were routed, at any time"""
        self._routing = routing
        self._outcomes: Counter[str] = Counter()
        self._http: Counter[tuple[str, str]] = Counter()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self.ttft_s = Histogram(_TTFT_BUCKETS_S)
        self.itl_s = Histogram(_ITL_BUCKETS_S)
        self.e2e_s = Histogram(_E2E_BUCKETS_S)
        self.certificate_ends_at_s: Callable[[], float] | None = None
        """Returns the Unix time at which the server's certificate expires; None without TLS."""
        self.request_trace: Callable[[], RequestTraceView] | None = None
        """Returns the counts of the request trace; None if none is written."""
        self.refused_messages = RefusedMessages()
        """Counts the malformed messages that engines send to this ingress."""

    def on_first_tokens(self, num_tokens: int, ttft_s: float) -> None:
        """Count the first tokens of a request. ttft_s: time since the request's arrival"""
        self._num_output_tokens += num_tokens
        self.ttft_s.observe(ttft_s)

    def on_next_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Count further tokens of a request. gap_s: time since its previous tokens, divided among these tokens"""
        self._num_output_tokens += num_tokens
        for _ in range(num_tokens):
            self.itl_s.observe(gap_s / num_tokens)

    def on_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt of a request that has ended."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens

    def on_end(self, outcome: str, e2e_s: float) -> None:
        """Count a request that has ended.

        outcome: its finish reason; "done" if it has none; outcome_of() the error if it failed
        e2e_s:   time since the request's arrival
        """
        self._outcomes[outcome] += 1
        self.e2e_s.observe(e2e_s)

    def on_http(self, path: str, status: int) -> None:
        """Count an answer to an HTTP call."""
        self._http[path, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of what this ingress has served."""
        requests = CounterMetricFamily("raypd_requests", "Requests that have ended, by outcome.", labels=["outcome"])
        for outcome, count in self._outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        documentation = "Answers of the HTTP API, by path and status code."
        http = CounterMetricFamily("raypd_http_responses", documentation, labels=["path", "status"])
        for key, count in self._http.items():
            http.add_metric(list(key), count)
        yield http
        documentation = "Prompt tokens of requests that have ended with a finish reason."
        yield CounterMetricFamily("raypd_prompt_tokens", documentation, self._num_prompt_tokens)
        documentation = "Prompt tokens that came from a prefix cache; they are part of raypd_prompt_tokens."
        yield CounterMetricFamily("raypd_cached_prompt_tokens", documentation, self._num_cached_tokens)
        documentation = "Output tokens that were sent to clients."
        yield CounterMetricFamily("raypd_output_tokens", documentation, self._num_output_tokens)
        documentation = "Time from a request's arrival to its first token, in seconds."
        yield self.ttft_s.family("raypd_time_to_first_token_seconds", documentation)
        documentation = "Time between consecutive output tokens of a request, in seconds."
        yield self.itl_s.family("raypd_inter_token_latency_seconds", documentation)
        documentation = "Malformed messages that engines sent to this ingress; each one ended a session."
        refused = CounterMetricFamily("raypd_refused_messages", documentation, labels=["kind"])
        for kind, count in self.refused_messages.counts().items():
            refused.add_metric([kind], count)
        yield refused
        if self.certificate_ends_at_s is not None:
            name, documentation = (
                "raypd_certificate_not_after_timestamp_seconds",
                "Unix time in seconds at which the server's certificate in use expires.",
            )
            yield GaugeMetricFamily(name, documentation, self.certificate_ends_at_s())
        if self.request_trace is not None:
            documentation = "Lines of the request trace that were written, or dropped as the disk was slow or full."
            lines = CounterMetricFamily("raypd_request_trace_lines", documentation, labels=["result"])
            view = self.request_trace()
            lines.add_metric(["written"], view.num_lines)
            lines.add_metric(["dropped"], view.num_dropped_lines)
            yield lines
        documentation = "Time from a request's arrival to its end, in seconds."
        yield self.e2e_s.family("raypd_request_duration_seconds", documentation)
        yield from _of_routing(self._routing())


def _of_routing(routing: RoutingSummary) -> Iterator[Metric]:
    documentation = "Requests that were routed and have ended, by way; fixed_rule: no costs were predicted for them."
    ways = CounterMetricFamily("raypd_routed_requests", documentation, labels=["way"])
    for way, count in zip(WAYS, routing.since_start.num_by_way, strict=True):
        ways.add_metric([way], count)
    yield ways
    documentation = "Predicted cost of the placements that were chosen, in seconds of engine time, own and inflicted."
    yield CounterMetricFamily("raypd_routing_cost_seconds", documentation, routing.since_start.chosen_s)
    documentation = (
        "Predicted cost of the best placements without roles, for the requests of raypd_routing_cost_seconds."
    )
    name = "raypd_routing_cost_without_roles_seconds"
    yield CounterMetricFamily(name, documentation, routing.since_start.without_roles_s)
    documentation = "Requests that had aims for their latencies and have ended; those whose clients left are left out."
    yield CounterMetricFamily("raypd_requests_with_aims", documentation, routing.since_start.num_with_aims)
    documentation = "Requests of raypd_requests_with_aims that ended well and met all of their aims: goodput."
    yield CounterMetricFamily("raypd_requests_aims_met", documentation, routing.since_start.num_met_aims)
    if routing.regret is not None:
        documentation = (
            "Regret of roles: raypd_routing_cost_seconds / raypd_routing_cost_without_roles_seconds over the last "
            f"{WINDOW_S:.0f} s. Below 1 roles have paid, above 1 they have cost."
        )
        yield GaugeMetricFamily("raypd_routing_regret_ratio", documentation, routing.regret)
    if routing.ttft_error is not None:
        documentation = (
            "Median of |measured / predicted - 1| of requests' times to the first token over the last "
            f"{WINDOW_S:.0f} s."
        )
        yield GaugeMetricFamily("raypd_ttft_prediction_error_ratio", documentation, routing.ttft_error)


def outcome_of(error: BaseException) -> str:
    """Return the outcome, as in raypd_requests, of a request that ended with this error."""
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


def exposition(metrics: ServingMetrics, view: ClusterView) -> bytes:
    """Return all metrics of an ingress in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*metrics.collect(), *_of_cluster(view)]))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_cluster(view: ClusterView) -> Iterator[Metric]:
    documentation = "Requests that this ingress works on, by phase."
    in_flight = GaugeMetricFamily("raypd_requests_in_flight", documentation, labels=["phase"])
    phases = Counter(request.phase for request in view.requests)
    for phase in ("admitted", "prefill", "decode"):
        in_flight.add_metric([phase], phases[phase])
    yield in_flight
    documentation = "Migrations of preempted requests of this ingress to another decode engine."
    yield CounterMetricFamily("raypd_migrations", documentation, view.num_migrations)
    documentation = "Longest delay of this ingress's event loop within the last minute, in seconds."
    yield GaugeMetricFamily("raypd_event_loop_lag_seconds", documentation, view.event_loop_lag_s)
    engines = GaugeMetricFamily("raypd_engines", "Engines of the cluster, by role and state.", labels=["role", "state"])
    for (role, state), count in Counter((engine.role, engine.state) for engine in view.engines).items():
        engines.add_metric([role, state], count)
    yield engines
    documentation = "1 if the controller answers this ingress, 0 if it does not."
    yield GaugeMetricFamily("raypd_controller_up", documentation, float(not view.controller.error))
    if view.controller.plan is not None:
        yield from metrics_of_plan(view.controller.plan)
    yield from _of_engines([engine for engine in view.engines if engine.stats is not None], view.now_s)


_ENGINE_LABELS: Final = ["engine", "role"]


def _of_engines(engines: Sequence[EngineView], now_s: float) -> Iterator[Metric]:
    documentation = "Requests that the engine has, by their state in its scheduler."
    requests = GaugeMetricFamily("raypd_engine_requests", documentation, labels=[*_ENGINE_LABELS, "state"])
    usage = _gauge("raypd_engine_kv_cache_usage_ratio", "Part of the KV cache's blocks that requests hold, 0 to 1.")
    blocks = _gauge("raypd_engine_kv_cache_blocks", "Blocks of the engine's KV cache.")
    prompt = _counter("raypd_engine_prompt_tokens", "Prompt tokens that the engine has computed.")
    output = _counter("raypd_engine_output_tokens", "Output tokens that the engine has generated.")
    preempted = _counter("raypd_engine_preemptions", "Preemptions: a running request lost its blocks to another one.")
    queried = _counter("raypd_engine_prefix_queried_tokens", "Prompt tokens looked up in the engine's prefix cache.")
    documentation = "Prompt tokens found in the prefix cache; they are part of raypd_engine_prefix_queried_tokens."
    cached = _counter("raypd_engine_prefix_cached_tokens", documentation)
    documentation = "Connections refused because the other end did not prove the cluster's secret."
    refused = _counter("raypd_engine_refused_connections", documentation)
    messages = CounterMetricFamily(
        "raypd_engine_refused_messages",
        "Messages from other processes of the cluster that the engine refused or dropped, by kind.",
        labels=[*_ENGINE_LABELS, "kind"],
    )
    for engine in engines:
        stats, labels = engine.stats, [engine.engine_id, engine.role]
        assert stats is not None, "the caller leaves out engines without counters"
        for kind, count in sorted(stats.all_refused_messages.items()):
            messages.add_metric([*labels, kind], count)
        for state, count in _requests_of(stats).items():
            requests.add_metric([*labels, state], count)
        usage.add_metric(labels, stats.kv_cache_usage)
        blocks.add_metric(labels, stats.num_blocks)
        prompt.add_metric(labels, stats.num_prompt_tokens_computed)
        output.add_metric(labels, stats.num_output_tokens)
        preempted.add_metric(labels, stats.num_preemptions)
        queried.add_metric(labels, stats.prefix_cache_stats.queries)
        cached.add_metric(labels, stats.prefix_cache_stats.hits)
        refused.add_metric(labels, stats.num_refused_connections)
    yield from (requests, usage, blocks, prompt, output, preempted, queried, cached, refused, messages)
    yield from _of_transfers(engines, now_s)


def _of_transfers(engines: Sequence[EngineView], now_s: float) -> Iterator[Metric]:
    documentation = "KV transfers that have ended, by outcome."
    transfers = CounterMetricFamily("raypd_transfers", documentation, labels=[*_ENGINE_LABELS, "outcome"])
    documentation = "Bytes of KV that the engine has sent and received."
    size = CounterMetricFamily("raypd_transfer_bytes", documentation, labels=[*_ENGINE_LABELS, "direction"])
    active = _gauge("raypd_transfers_active", "KV transfers under way.")
    pinned = _gauge("raypd_transfer_pinned_blocks", "Blocks that KV transfers keep from being freed.")
    seconds = _counter("raypd_transfer_seconds", "Total duration of the KV transfers of handoffs, in seconds.")
    documentation = "Part of raypd_transfer_seconds that prefill did not hide, in seconds."
    exposed = _counter("raypd_transfer_exposed_seconds", documentation)
    documentation = "KV transfers whose duration is in raypd_transfer_seconds."
    timed = _counter("raypd_timed_transfers", documentation)
    lost = _counter("raypd_links_lost", "Links that ended while transfers were on them.")
    stalls = _counter("raypd_transfer_stalls", "Chunks of KV that made no progress before their deadline.")
    documentation = "Chunks of KV whose checksum differed from the producer's."
    corrupt = _counter("raypd_transfer_corrupt_chunks", documentation)
    documentation = "Time for which the oldest KV transfer has kept blocks from being freed, in seconds."
    oldest = _gauge("raypd_transfer_oldest_pin_seconds", documentation)
    for engine in engines:
        stats = None if engine.stats is None else engine.stats.transfer_stats
        labels = [engine.engine_id, engine.role]
        if stats is None:
            continue
        for outcome, count in _outcomes_of(stats).items():
            transfers.add_metric([*labels, outcome], count)
        size.add_metric([*labels, "sent"], stats.num_sent_bytes)
        size.add_metric([*labels, "received"], stats.num_received_bytes)
        active.add_metric(labels, stats.num_active_transfers)
        pinned.add_metric(labels, stats.num_pinned_blocks)
        seconds.add_metric(labels, stats.transfer_s)
        exposed.add_metric(labels, stats.exposed_s)
        timed.add_metric(labels, stats.num_timed_transfers)
        lost.add_metric(labels, stats.num_links_lost)
        stalls.add_metric(labels, stats.num_stalls)
        corrupt.add_metric(labels, stats.num_corrupt_chunks)
        oldest.add_metric(labels, now_s - stats.oldest_pin_at_s if stats.oldest_pin_at_s is not None else 0.0)
    yield from (transfers, size, active, pinned, seconds, exposed, timed, lost, stalls, corrupt, oldest)


def _requests_of(stats: SchedulerStats) -> dict[str, int]:
    return {
        "running": stats.num_running_reqs,
        "waiting": stats.num_waiting_reqs,
        "waiting_for_remote_kvs": stats.num_waiting_for_remote_kvs,
        "held": stats.num_held_reqs,
    }


def _outcomes_of(stats: TransferStats) -> dict[str, int]:
    return {
        "completed": stats.num_transfers_completed,
        "failed": stats.num_transfers_failed,
        "cancelled": stats.num_transfers_cancelled,
    }


def _gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=_ENGINE_LABELS)


def _counter(name: str, documentation: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, labels=_ENGINE_LABELS)
