"""Makes metrics of the planner's newest decision."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cluster.planning.fleet_counts import PLANNED_ROLES
from cluster.planning.plan_record import PlanAction, PlanRecord


def metrics_of_plan(plan: PlanRecord) -> Iterator[Metric]:
    """Yield the target, the forecast and its error, and the action of a decision."""
    documentation = "Engines that the planner wants, by role."
    target = GaugeMetricFamily("raypd_planner_target_engines", documentation, labels=["role"])
    for role in PLANNED_ROLES:
        target.add_metric([role.value], plan.target.of_role(role))
    yield target
    documentation = "Forecast work in engine-seconds per second: so many engines are busy with it."
    work = GaugeMetricFamily("raypd_planner_forecast_work_ratio", documentation, labels=["kind", "quantile"])
    for kind, made in (("prefill", plan.forecast.prefill), ("decode", plan.forecast.decode)):
        work.add_metric([kind, "middle"], made.value)
        work.add_metric([kind, "high"], made.high)
    yield work
    if plan.forecast.last_error is not None:
        documentation = "Error of the newest forecast whose time is over: what came / what was forecast - 1."
        yield GaugeMetricFamily("raypd_planner_forecast_error_ratio", documentation, plan.forecast.last_error)
    documentation = "1 for the action of the planner's newest decision, 0 for the others."
    actions = GaugeMetricFamily("raypd_planner_action", documentation, labels=["action"])
    for action in PlanAction:
        actions.add_metric([action.value], float(action is plan.action))
    yield actions
    documentation = "Findings of the planner, such as an aim that no number of engines attains."
    yield GaugeMetricFamily("raypd_planner_findings", documentation, len(plan.findings))
    documentation = "Unix time in seconds of the planner's newest decision."
    yield GaugeMetricFamily("raypd_planner_decided_timestamp_seconds", documentation, plan.at_s)
