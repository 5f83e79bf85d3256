"""Everything that the views of a cluster say arrives in the messages, whose fields all say something."""

from __future__ import annotations

import enum
from collections.abc import Iterator, MutableSequence
from dataclasses import fields, is_dataclass
from itertools import count
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.message import Message

from actors.core.outputs.scheduler_stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats
from actors.costs.step_cost_model import StepCostModel
from cluster.api.grpc.conversions.status_messages import source_of, status_to_proto
from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.observability.routing_figures import RoutingSummary, RoutingTotals
from cluster.observability.status import ClusterView, ControllerView, EngineView
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.plan_record import PlanAction, PlannerMode, PlanRecord, WorkForecast
from cluster.planning.work_forecast import Forecast
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.transfer_stats import TransferStats

NOT_SHOWN: Final[dict[type, set[str]]] = {
    ClusterView: {"now_s", "event_loop_lag_s", "num_requests_left_out"},
    ControllerView: {"engines", "taken_at_s"},
    SchedulerStats: {
        *("block_size", "kv_cache_usage", "num_refused_handoffs", "num_corrupted_reqs", "num_refused_connections"),
        *("refused_messages", "load_report", "step_stats", "num_waiting_by_reason", "grammar_stats"),
    },
    PrefixCacheStats: {"reset", "requests", "fetched"},
    SpecDecodingStats: {"num_spec_tokens"},
    TransferStats: {
        *("num_sent_blocks", "num_received_blocks", "num_timed_transfers", "transfer_s", "exposed_s", "num_links"),
        *("link_loads", "failures"),
    },
    StoreStats: {"num_loaded_bytes", "load_s"},
    StepCostModel: {"coefficients"},
}
"""Fields that are in no message: metrics have them, or messages have what is computed of them."""


def _filled(hint: Any, numbers: Iterator[int]) -> Any:
    """A value of a type in which no two numbers and no two texts are equal."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _filled(hint.__origin__, numbers)
    if NoneType in arguments:
        return _filled(next(one for one in arguments if one is not NoneType), numbers)
    if origin in (tuple, list):
        return origin([_filled(arguments[0], numbers)])
    if origin is dict:
        return {_filled(arguments[0], numbers): _filled(arguments[1], numbers)}
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{one.name: _filled(hints[one.name], numbers) for one in fields(hint)})  # type: ignore[operator]  # it is a class
    if hint is RoutingSummary:
        one = RoutingTotals((1, 2, 3, 4), 5.0, 6.0, (7,) * len(RoutingTotals().num_by_error), 9, 8)
        return RoutingSummary(one, one + one, 10.0)
    if hint is PlanRecord:
        work = WorkForecast(Forecast(1.5, 1.0, 2.5), Forecast(3.5, 3.0, 4.5), last_error=0.25)
        record = PlanRecord(
            9.0, PlannerMode.ACT, FleetCounts(1, 2, 3), FleetCounts(4, 5, 6), PlanAction.CHANGE, "why", forecast=work
        )
        return msgspec.structs.replace(record, findings=("one",), least_engines=7, estimated_by="simulation")
    if issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{one.name: _filled(hints[one.name], numbers) for one in msgspec.structs.fields(hint)})
    if issubclass(hint, enum.Enum):
        return next(iter(hint))
    if hint is bool:
        return True
    return hint(next(numbers))


def _empty_fields(message: Message) -> list[str]:
    """The fields that say nothing, in this message and in those inside it."""
    present = {field.name: value for field, value in message.ListFields()}
    empty = [f"{message.DESCRIPTOR.name}.{name}" for name in message.DESCRIPTOR.fields_by_name if name not in present]
    for value in present.values():
        parts = value if isinstance(value, MutableSequence) else [value]
        empty += [name for part in parts if isinstance(part, Message) for name in _empty_fields(part)]
    return empty


def _read_from(message: Any, kind: type, hints: dict[type, set[str]]) -> None:
    """Collect which fields of the views the fields of a message are filled from. message: its descriptor"""
    for field in message.fields:
        source = source_of(message.name, field.name, kind)
        if source is None:
            continue
        inner: Any = kind
        for name in source.split("."):
            owner = inner
            hints.setdefault(owner, set()).add(name)
            inner = _class_of(get_type_hints(owner, include_extras=False).get(name))
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            _read_from(field.message_type, inner, hints)


def _class_of(hint: Any) -> Any:
    """The class inside of an optional, or of a tuple."""
    arguments = [one for one in get_args(hint) if one not in (NoneType, Ellipsis)]
    return _class_of(arguments[0]) if arguments else hint


def test_every_field_of_the_messages_says_something() -> None:
    numbers = count(7)
    view = _filled(ClusterView, numbers)
    assert isinstance(view, ClusterView)
    object.__setattr__(view, "now_s", float(next(numbers) + 1000))  # Every time is past.

    # The numbers grow from field to field, so the errors of the predictions are large.
    assert _empty_fields(status_to_proto(view)) == ["StepCosts.is_sure"]


def test_every_field_of_the_views_arrives() -> None:
    read: dict[type, set[str]] = {}
    _read_from(admin_pb2.GetStatusResponse.DESCRIPTOR, ClusterView, read)

    unread = {
        kind: {one.name for one in fields(kind)} - names
        for kind, names in read.items()
        if is_dataclass(kind) and {one.name for one in fields(kind)} - names
    }
    assert unread == NOT_SHOWN
    assert EngineView not in unread
