"""Makes metrics of the cluster: of the ingress itself, the controller and its decisions, and the engines by state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from cluster.observability.plan_metrics import metrics_of_plan
from cluster.observability.prometheus.declaration import counter, gauge
from cluster.observability.prometheus.engine_figures import collect_engines, newest
from cluster.observability.prometheus.transfer_figures import collect_transfers
from cluster.observability.status import ClusterView, ControllerView, PrefixIndexView

_PHASES: Final = ("admitted", "prefill", "decode")

_IN_FLIGHT: Final = gauge("raypd_requests_in_flight", "Requests that this ingress works on, by phase.", "phase")
_LAG: Final = gauge(
    "raypd_event_loop_lag_seconds", "Longest delay of this ingress's event loop within the last minute.", unit="s"
)
_ENGINES: Final = gauge("raypd_engines", "Engines of the cluster, by role and state.", "role", "state")
_REFUSED_PAIRS: Final = gauge(
    "raypd_refused_pairs", "Pairs of engines that cannot hand over to each other; `raypd status` has the reasons."
)
_MODEL_VERSIONS: Final = gauge(
    "raypd_model_version_engines", "Engines that get new requests, by version of the model.", "version"
)
_CONTROLLER_UP: Final = gauge("raypd_controller_up", "1 if the controller answers this ingress, 0 if it does not.")
_VIEW_AGE: Final = gauge(
    "raypd_controller_view_age_seconds",
    "Age of what this ingress knows from the controller: states of engines, decisions, the plan.",
    unit="s",
)
_DECIDED: Final = gauge(
    "raypd_controller_decided_timestamp_seconds",
    "Unix time of the controller's newest decision; `raypd status` has its text.",
    unit="s",
)
_INGRESSES: Final = gauge("raypd_ingresses", "Ingresses of the cluster, by state.", "state")
_INDEX_BLOCKS: Final = gauge(
    "raypd_prefix_index_blocks",
    "Blocks of cached prefixes that this ingress knows, by version of the model.",
    "version",
)
_INDEX_BYTES: Final = gauge(
    "raypd_prefix_index_bytes", "Memory of the index of cached prefixes.", "version", unit="bytes"
)
_INDEX_LOOKUPS: Final = counter(
    "raypd_prefix_index_lookups_total",
    "Prompts that were looked up in the index. result: hit if an engine had a prefix of it, else miss.",
    "version",
    "result",
)
_INDEX_REPORTS: Final = counter(
    "raypd_prefix_index_reports_total",
    "Reports of engines about their caches: changes, gaps where reports were missing, and complete snapshots.",
    "version",
    "kind",
)
DECLARATIONS: Final = (
    *(_IN_FLIGHT, _LAG, _ENGINES, _REFUSED_PAIRS, _MODEL_VERSIONS, _CONTROLLER_UP, _VIEW_AGE, _DECIDED),
    *(_INGRESSES, _INDEX_BLOCKS, _INDEX_BYTES, _INDEX_LOOKUPS, _INDEX_REPORTS),
)


def collect_cluster(view: ClusterView) -> Iterator[Metric]:
    """Yield the metrics of a cluster."""
    phases = Counter(request.phase for request in view.requests)
    yield _IN_FLIGHT.of(((phase,), phases[phase]) for phase in _PHASES)
    yield _LAG.one(view.event_loop_lag_s)
    yield _ENGINES.of(Counter((engine.role, engine.state) for engine in view.engines).items())
    yield _REFUSED_PAIRS.one(len(view.refused_pairs))
    yield _MODEL_VERSIONS.of(((str(model.version),), model.num_engines) for model in view.models)
    yield from _of_controller(view.controller, view.now_s)
    yield from _of_prefix_indexes(view.prefix_indexes)
    engines = newest(view.engines)
    yield from collect_engines(engines)
    yield from collect_transfers(engines, view.now_s)


def _of_controller(controller: ControllerView, now_s: float) -> Iterator[Metric]:
    yield _CONTROLLER_UP.one(float(not controller.error))
    if controller.taken_at_s:
        yield _VIEW_AGE.one(max(0.0, now_s - controller.taken_at_s))
    if controller.decisions:
        yield _DECIDED.one(controller.decisions[-1].at_s)
    if controller.ingresses:
        yield _INGRESSES.of(Counter((ingress.state,) for ingress in controller.ingresses).items())
    if controller.plan is not None:
        yield from metrics_of_plan(controller.plan)


def _of_prefix_indexes(indexes: tuple[PrefixIndexView, ...]) -> Iterator[Metric]:
    if not indexes:
        return
    yield _INDEX_BLOCKS.of(((str(one.version),), one.num_blocks) for one in indexes)
    yield _INDEX_BYTES.of(((str(one.version),), one.size_bytes) for one in indexes)
    yield _INDEX_LOOKUPS.of(
        ((str(one.version), result), number)
        for one in indexes
        for result, number in (("hit", one.num_hits), ("miss", one.num_lookups - one.num_hits))
    )
    yield _INDEX_REPORTS.of(
        ((str(one.version), kind), number)
        for one in indexes
        for kind, number in (("event", one.num_events), ("gap", one.num_gaps), ("snapshot", one.num_snapshots))
    )
