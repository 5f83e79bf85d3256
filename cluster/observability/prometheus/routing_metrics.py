"""Metrics of how one ingress has routed its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from cluster.observability.prometheus.declaration import counter, gauge
from cluster.observability.routing_figures import WAYS, WINDOW_S, RoutingSummary

_REQUESTS: Final = counter(
    "raypd_routed_requests_total",
    "Requests that were routed and have ended, by way; fixed_rule: no costs were predicted for them.",
    "way",
)
_COST: Final = counter(
    "raypd_routing_cost_seconds_total",
    "Predicted cost of the placements that were chosen, in engine time, own and inflicted.",
    unit="s",
)
_COST_WITHOUT_ROLES: Final = counter(
    "raypd_routing_cost_without_roles_seconds_total",
    "Predicted cost of the best placements without roles, for the requests of raypd_routing_cost_seconds_total.",
    unit="s",
)
_WITH_AIMS: Final = counter(
    "raypd_requests_with_aims_total",
    "Requests that had aims for their latencies and have ended; those whose clients left are left out.",
)
_AIMS_MET: Final = counter(
    "raypd_requests_aims_met_total",
    "Requests of raypd_requests_with_aims_total that ended well and met all of their aims: goodput.",
)
_REGRET: Final = gauge(
    "raypd_routing_regret_ratio",
    "Regret of roles: raypd_routing_cost_seconds_total / raypd_routing_cost_without_roles_seconds_total over the last "
    f"{WINDOW_S:.0f} s. Below 1 roles have paid, above 1 they have cost.",
)
_TTFT_ERROR: Final = gauge(
    "raypd_ttft_prediction_error_ratio",
    f"Median of |measured / predicted - 1| of requests' times to the first token over the last {WINDOW_S:.0f} s.",
)
DECLARATIONS: Final = (_REQUESTS, _COST, _COST_WITHOUT_ROLES, _WITH_AIMS, _AIMS_MET, _REGRET, _TTFT_ERROR)


def metrics_of_routing(routing: RoutingSummary) -> Iterator[Metric]:
    """Yield how requests were routed; the ratios only if anything was predicted lately."""
    totals = routing.since_start
    yield _REQUESTS.of(((way,), count) for way, count in zip(WAYS, totals.num_by_way, strict=True))
    yield _COST.one(totals.chosen_s)
    yield _COST_WITHOUT_ROLES.one(totals.without_roles_s)
    yield _WITH_AIMS.one(totals.num_with_aims)
    yield _AIMS_MET.one(totals.num_met_aims)
    if routing.regret is not None:
        yield _REGRET.one(routing.regret)
    if routing.ttft_error is not None:
        yield _TTFT_ERROR.one(routing.ttft_error)
