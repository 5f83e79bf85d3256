"""Makes metrics of the planner's newest decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from cluster.observability.prometheus.declaration import gauge
from cluster.planning.fleet_counts import PLANNED_ROLES
from cluster.planning.plan_record import PlanAction, PlanRecord

_TARGET: Final = gauge("raypd_planner_target_engines", "Engines that the planner wants, by role.", "role")
_LEAST: Final = gauge(
    "raypd_planner_least_engines",
    "The fewest engines that can do the work that is planned for, however good the rest of the system is.",
)
_WORK: Final = gauge(
    "raypd_planner_forecast_work_ratio",
    "Forecast work in engine-seconds per second: so many engines are busy with it.",
    "kind",
    "quantile",
)
_ERROR: Final = gauge(
    "raypd_planner_forecast_error_ratio",
    "Error of the newest forecast whose time is over: what came / what was forecast - 1.",
)
_ACTION: Final = gauge(
    "raypd_planner_action", "1 for the action of the planner's newest decision, 0 for the others.", "action"
)
_FINDINGS: Final = gauge(
    "raypd_planner_findings", "Findings of the planner, such as an aim that no number of engines attains."
)
_DECIDED: Final = gauge(
    "raypd_planner_decided_timestamp_seconds", "Unix time of the planner's newest decision.", unit="s"
)
DECLARATIONS: Final = (_TARGET, _LEAST, _WORK, _ERROR, _ACTION, _FINDINGS, _DECIDED)


def metrics_of_plan(plan: PlanRecord) -> Iterator[Metric]:
    """Yield the target and its bound, the forecast and its error, and the action of a decision."""
    yield _TARGET.of(((role.value,), plan.target.of_role(role)) for role in PLANNED_ROLES)
    yield _LEAST.one(plan.least_engines)
    forecast = plan.forecast
    yield _WORK.of(
        [
            (("prefill", "middle"), forecast.prefill.value),
            (("prefill", "high"), forecast.prefill.high),
            (("decode", "middle"), forecast.decode.value),
            (("decode", "high"), forecast.decode.high),
        ]
    )
    if forecast.last_error is not None:
        yield _ERROR.one(forecast.last_error)
    yield _ACTION.of(((action.value,), float(action is plan.action)) for action in PlanAction)
    yield _FINDINGS.one(len(plan.findings))
    yield _DECIDED.one(plan.at_s)
