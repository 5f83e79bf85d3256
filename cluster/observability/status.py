"""Defines the status of a cluster for operators, put together from what the controller and an ingress know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.observability.routing_figures import NOTHING_ROUTED, RoutingSummary
from cluster.planning.plan_record import PlanRecord
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.pairing import RefusedPair


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine.

    state:      the controller's name for its state; "connected" if only the ingress knows the engine
    stats:      its newest counters; None if none have come
    stats_at_s: Unix time in seconds at which these counters came
    dtype:      data type that its model computes in; "" if that is not known yet
    """

    engine_id: str
    incarnation: int
    role: str
    state: str
    address: str = ""
    last_error: str = ""
    kv_transport: str = ""
    node: str = ""
    stats: SchedulerStats | None = None
    stats_at_s: float = 0.0
    model_version: int = 1
    attention_backend: str = ""
    attention_reason: str = ""
    linear_layers: str = ""
    cpu_threads: str = ""
    cuda_graphs: str = ""
    dtype: str = ""
    left_out_inputs: str = ""


@dataclass(frozen=True, slots=True)
class RequestTraceView:
    """The request trace of one ingress.

    num_lines, num_dropped_lines: lines written, and dropped because the disk was slow or full, since its start
    error: why lines cannot be written now; "" if they can
    """

    num_lines: int = 0
    num_dropped_lines: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class IngressView:
    """One ingress.

    state:        starting, ready, busy, or waiting for its next try
    num_requests: requests in flight
    busy_s:       for how many seconds its event loop has been busy with one piece of work
    routing:      how it has routed requests
    request_trace: None if it writes none
    """

    number: int
    incarnation: int
    state: str
    address: str = ""
    node: str = ""
    last_error: str = ""
    num_requests: int = 0
    http_address: str = ""
    busy_s: float = 0.0
    routing: RoutingSummary = NOTHING_ROUTED
    request_trace: RequestTraceView | None = None


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A request in flight.

    request_id:     unique among the requests in flight of its tenant
    arrived_at_s:   Unix time in seconds
    phase:          admitted, prefill or decode
    attempt:        1 for the first attempt, 0 before it
    num_migrations: how often another decode engine has taken the request over after a preemption
    model_version:  0 until a version is chosen
    tenant:         "" if the cluster has no tenants
    """

    request_id: str
    arrived_at_s: float
    phase: str
    prefill_engine: str = ""
    decode_engine: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    attempt: int = 0
    num_migrations: int = 0
    model_version: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A version of the model.

    directory:    the directory of its checkpoint
    num_engines:  engines of this version that get new requests
    num_requests: requests in flight of this version
    last_error:   why the ingress cannot serve this version; "" if it can
    """

    version: int
    directory: str
    num_engines: int = 0
    num_requests: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class PrefixIndexView:
    """The prefixes that engines have cached, as far as an ingress knows them, for one version of the model.

    stride:        every stride-th block of a prefix is kept
    num_lookups:   prompts that were looked up
    num_hits:      those of which an engine had a prefix
    num_events:    changes of their caches that engines have reported
    num_gaps:      how often reports were missing
    num_snapshots: complete reports of all blocks of an engine
    """

    version: int
    num_blocks: int
    size_bytes: int
    max_bytes: int
    stride: int
    num_lookups: int = 0
    num_hits: int = 0
    num_events: int = 0
    num_gaps: int = 0
    num_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the controller did. at_s: Unix time in seconds"""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class ControllerView:
    """The part of the status that comes from the controller.

    update: the progress of the rolling update under way, and what delays it; "" if none is under way
    error:  why the controller did not answer; "" if it did
    plan:   the planner's newest decision; None if there is no planner, or it has not decided yet
    taken_at_s: Unix time in seconds of the controller's last answer; 0: it has not answered yet
    """

    engines: tuple[EngineView, ...] = ()
    decisions: tuple[Decision, ...] = ()
    ingresses: tuple[IngressView, ...] = ()
    update: str = ""
    error: str = ""
    plan: PlanRecord | None = None
    taken_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The whole status of a cluster, as one ingress sees it.

    now_s:            Unix time in seconds at which the status was taken
    num_migrations:   how often the ingress has seen another decode engine take over a preempted request
    routing:          how all ingresses have routed requests; of this one alone if the controller does not answer
    prefix_indexes:   what this ingress knows of cached prefixes, by version of the model
    event_loop_lag_s: the longest delay of the ingress's event loop within the last minute, in seconds
    num_requests_left_out: requests in flight that are not in `requests`, and not counted in `models`
    """

    model: str
    now_s: float
    membership_version: int
    engines: tuple[EngineView, ...]
    requests: tuple[RequestView, ...]
    controller: ControllerView = field(default_factory=ControllerView)
    refused_pairs: tuple[RefusedPair, ...] = ()
    models: tuple[ModelView, ...] = ()
    num_migrations: int = 0
    routing: RoutingSummary = NOTHING_ROUTED
    prefix_indexes: tuple[PrefixIndexView, ...] = ()
    event_loop_lag_s: float = 0.0
    num_requests_left_out: int = 0


def ingress_name(number: int) -> str:
    """Return the name by which an ingress introduces itself to engines, and that records have."""
    return f"ingress-{number}"


def merge_engines(
    controller: Iterable[EngineView],
    members: Iterable[EngineDescriptor],
    stats: Mapping[tuple[str, int], tuple[SchedulerStats, float]],
) -> tuple[EngineView, ...]:
    """Return every engine that the controller or the ingress knows, ordered by id and incarnation.

    controller: the engines that the controller knows
    members:    the engines in the ingress's membership
    stats:      counters that the ingress has, by engine id and incarnation, each with the Unix time at which they came;
                they are newer than the controller's, and replace these
    """
    merged: dict[tuple[str, int], EngineView] = {
        member.key: EngineView(
            member.engine_id,
            member.incarnation,
            member.role.value,
            "connected",
            member.address,
            model_version=member.model_version,
        )
        for member in members
    }
    merged.update({(engine.engine_id, engine.incarnation): engine for engine in controller})
    views = []
    for key, engine in sorted(merged.items()):
        newest, at_s = stats.get(key, (engine.stats, engine.stats_at_s))
        views.append(replace(engine, stats=newest, stats_at_s=at_s))
    return tuple(views)
