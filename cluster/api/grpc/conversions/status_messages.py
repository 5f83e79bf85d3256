"""Makes raypd.v1's messages about a cluster's status of the cluster's views, by the names of their fields.

A message's field is filled from the view's field of the same name, or from one whose name differs only by the
conventions of names: `running` from num_running_reqs, `busy_seconds` from busy_s. _OTHER_NAMES has all others.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from actors.core.outputs.scheduler_stats import EmbeddingStats
from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.api.shared.version import server_version
from cluster.observability.status import ClusterView

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "GetStatusResponse.decisions": "controller.decisions",
    "GetStatusResponse.controller_error": "controller.error",
    "GetStatusResponse.update": "controller.update",
    "GetStatusResponse.ingresses": "controller.ingresses",
    "GetStatusResponse.planner": "controller.plan",
    "PlannerStatus.age_seconds": "at_s",
    "PlannerStatus.prefill_work": "forecast.prefill.value",
    "PlannerStatus.decode_work": "forecast.decode.value",
    "PlannerStatus.prefill_work_high": "forecast.prefill.high",
    "PlannerStatus.decode_work_high": "forecast.decode.high",
    "PlannerStatus.forecast_error": "forecast.last_error",
    "RefusedPair.prefill_engine": "prefill",
    "RefusedPair.decode_engine": "decode",
    "Decision.age_seconds": "at_s",
    "EngineStatus.load": "stats",
    "EngineStatus.transfers": "stats.transfer_stats",
    "EngineStatus.links": "stats.transfer_stats.links",
    "EngineStatus.stores": "stats.store_stats",
    "EngineStatus.spec_decoding": "stats.spec_decoding_stats",
    "EngineStatus.adapters": "stats.adapter_stats",
    "EngineStatus.embeddings": "stats.embedding_stats",
    "EngineStatus.step_costs": "stats.step_costs",
    "EngineStatus.age_seconds": "stats_at_s",
    "RoutingStatus.goodput_per_second": "goodput_per_s",
    "StepCosts.age_seconds": "updated_at_s",
    "EngineLoad.prompt_tokens": "num_prompt_tokens_computed",
    "EngineLoad.prefix_queried_tokens": "prefix_cache_stats.queries",
    "EngineLoad.prefix_cached_tokens": "prefix_cache_stats.hits",
    "EngineLoad.prefix_loaded_tokens": "prefix_cache_stats.loaded",
    "TransferStatus.completed": "num_transfers_completed",
    "TransferStatus.failed": "num_transfers_failed",
    "TransferStatus.cancelled": "num_transfers_cancelled",
    "TransferStatus.active": "num_active_transfers",
    "TransferStatus.mean_transfer_seconds": "mean_transfer_s",
    "TransferStatus.mean_exposed_seconds": "mean_exposed_s",
    "LinkStatus.end": "role",
    "LinkStatus.age_seconds": "opened_at_s",
    "LinkStatus.idle_seconds": "last_active_at_s",
    "RequestInFlight.age_seconds": "arrived_at_s",
}

_NO_EMBEDDINGS: Final = EmbeddingStats()
"""The statistics of an engine that has neither sent nor received embeddings, which are left out of its message."""


@dataclass(frozen=True, slots=True)
class _Step:
    """How one field of a message is filled.

    name:        the message's field
    path:        the view's fields that lead to the value
    is_time:     whether the value is a time, of which the field has the age
    is_repeated: whether the field has several values
    inner:       the class of the messages in the field; None if it has plain values
    """

    name: str
    path: tuple[str, ...]
    is_time: bool
    is_repeated: bool
    inner: type[Message] | None


def status_to_proto(view: ClusterView) -> admin_pb2.GetStatusResponse:
    """Return the answer of GetStatus."""
    message = _message(admin_pb2.GetStatusResponse, view, view.now_s)
    assert isinstance(message, admin_pb2.GetStatusResponse), "it was asked for"
    message.server_version = server_version()
    return message


def _message(kind: type[Message], view: object, now_s: float) -> Message:
    values: dict[str, Any] = {}
    for step in _steps(kind, type(view)):  # type: ignore[arg-type]  # a class can be hashed
        value = _read(view, step.path)
        if value is None or value == _NO_EMBEDDINGS:
            continue
        if step.inner is not None:
            inner = step.inner
            value = (
                [_message(inner, one, now_s) for one in value] if step.is_repeated else _message(inner, value, now_s)
            )
        elif step.is_time:
            value = _age(value, now_s)
        elif isinstance(value, enum.Enum):
            value = value.name.lower()
        values[step.name] = value
    return kind(**values)


def _read(view: object, path: tuple[str, ...]) -> Any:
    """Follow a path of fields; returns None if one of them is None."""
    for name in path:
        view = getattr(view, name)
        if view is None:
            return None
    return view


@functools.cache
def _steps(kind: type[Message], view: type[Any]) -> list[_Step]:
    steps = []
    for field in kind.DESCRIPTOR.fields:
        source = source_of(kind.DESCRIPTOR.name, field.name, view)
        if source is None:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = None
        inner_kind = None if inner is None else GetMessageClass(inner)  # type: ignore[arg-type]  # upb has a class of its own
        path, is_time = tuple(source.split(".")), source.endswith("at_s")
        steps.append(_Step(field.name, path, is_time, field.is_repeated, inner_kind))
    return steps


def source_of(message: str, name: str, view: type[Any]) -> str | None:
    """Return the path, with dots, of the view's fields that a message's field is filled from; None if there is none.

    message: the message's name; name: the field's name; view: the view's class, which has its fields in slots
    """
    seconds = name.removesuffix("_seconds")
    names = [name, f"num_{name}", f"num_{name}_reqs", f"{seconds}_at_s", f"{seconds}_s"]
    other = _OTHER_NAMES.get(f"{message}.{name}")
    return other or next((one for one in names if hasattr(view, one)), None)


def _age(at_s: float, now_s: float) -> float:
    """Return the age of a time, at least 0, because the clocks of two hosts may differ a little.

    A time of 0 stands for "never", and gives the age 0.
    """
    return max(0.0, now_s - at_s) if at_s else 0.0
