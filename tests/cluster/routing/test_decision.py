from dataclasses import replace

import msgspec
import pytest

from cluster.routing.base import Route
from cluster.routing.decision import Decision, LateDecision, Reason, RouteTerms, RoutingMode, Way
from cluster.routing.engine_connection import EngineDescriptor, EngineRole

_TERMS = RouteTerms(Way.PREFILL_DECODE, "prefill-0", "decode-0", prefill_s=0.25, total_s=0.5)
_DECISION = Decision(
    "r", RoutingMode.COST, Reason.COST, _TERMS, (RouteTerms(Way.DECODE_ALONE, None, "decode-0", total_s=0.75),)
)


class _Engine:
    descriptor = EngineDescriptor("both-0", 1, EngineRole.BOTH, "127.0.0.1:1")
    num_unfinished_requests = 0


def test_a_decision_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(_DECISION), type=Decision) == _DECISION


def test_a_decision_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        _DECISION.reason = Reason.MODE  # type: ignore[misc]  # The test is that this fails.


def test_routes_to_the_same_engines_are_equal_whatever_decided() -> None:
    route = Route(None, _Engine())
    assert route.decision is None
    described = replace(route, reasons=LateDecision(lambda: _DECISION))
    assert described == route
    assert described.decision is _DECISION
    assert route.decision is None
