"""A cluster as an operator wants to see it: what the controller and an ingress know of it, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.pairing import RefusedPair


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine. state: the controller's word for it; stats: its newest, of stats_at_s (Unix time)."""

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


@dataclass(frozen=True, slots=True)
class IngressView:
    """One ingress.

    state:        starting, ready, busy, or waiting for its next try
    num_requests: in flight
    busy_s:       for how long its event loop has been busy with one thing
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


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request in flight. phase: admitted, prefill or decode; attempt: 1 for the first.

    request_id: unique among its tenant's
    tenant: "" where there are none
    num_moves: how often another decode engine has taken it over after a preemption
    model_version: 0 before it is chosen
    """

    request_id: str
    arrived_at_s: float
    phase: str
    prefill_engine: str = ""
    decode_engine: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    attempt: int = 0
    num_moves: int = 0
    model_version: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A version of the model. num_engines: that get new requests; last_error: why the ingress gives them none."""

    version: int
    directory: str
    num_engines: int = 0
    num_requests: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the controller did. at_s: Unix time."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class ControllerView:
    """What the controller knows.

    update: how far the rolling update is that is under way, and what holds it up
    error:  why the controller did not answer, if it did not
    """

    engines: tuple[EngineView, ...] = ()
    decisions: tuple[Decision, ...] = ()
    ingresses: tuple[IngressView, ...] = ()
    update: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything, as of now_s (Unix time).

    num_moves:        of preempted requests to other decode engines, by its ingress
    event_loop_lag_s: by how much the event loop of its ingress was late at most, within the last minute
    """

    model: str
    now_s: float
    membership_version: int
    engines: tuple[EngineView, ...]
    requests: tuple[RequestView, ...]
    controller: ControllerView = field(default_factory=ControllerView)
    refused_pairs: tuple[RefusedPair, ...] = ()
    models: tuple[ModelView, ...] = ()
    num_moves: int = 0
    event_loop_lag_s: float = 0.0


def merge_engines(
    controller: Iterable[EngineView],
    members: Iterable[EngineDescriptor],
    stats: Mapping[tuple[str, int], tuple[SchedulerStats, float]],
) -> tuple[EngineView, ...]:
    """Every engine that either side knows of, by id; of both sides' counters the ingress's, which are the fresher.

    stats: by engine id and incarnation, each with its Unix time
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
