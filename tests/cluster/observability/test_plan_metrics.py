"""The metrics of the planner's newest decision."""

from __future__ import annotations

from cluster.observability.plan_metrics import metrics_of_plan
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.plan_record import PlanAction, PlannerMode, PlanRecord, WorkForecast
from cluster.planning.work_forecast import Forecast


def _samples(plan: PlanRecord) -> dict[tuple[str, ...], float]:
    found = {}
    for metric in metrics_of_plan(plan):
        for sample in metric.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_metrics_show_the_target_the_forecast_and_its_error() -> None:
    work = WorkForecast(Forecast(1.5, 1.0, 2.5), Forecast(3.5, 3.0, 4.5), last_error=-0.25)
    target = FleetCounts(2, 3)
    current, action = FleetCounts(1, 3), PlanAction.CHANGE
    plan = PlanRecord(
        7.0, PlannerMode.ACT, current, target, action, "why", findings=("a", "b"), forecast=work, least_engines=4
    )
    assert _samples(plan) == {
        ("raypd_planner_target_engines", "prefill"): 2,
        ("raypd_planner_target_engines", "decode"): 3,
        ("raypd_planner_target_engines", "both"): 0,
        ("raypd_planner_least_engines",): 4,
        ("raypd_planner_forecast_work_ratio", "prefill", "middle"): 1.5,
        ("raypd_planner_forecast_work_ratio", "prefill", "high"): 2.5,
        ("raypd_planner_forecast_work_ratio", "decode", "middle"): 3.5,
        ("raypd_planner_forecast_work_ratio", "decode", "high"): 4.5,
        ("raypd_planner_forecast_error_ratio",): -0.25,
        ("raypd_planner_action", "hold"): 0,
        ("raypd_planner_action", "change"): 1,
        ("raypd_planner_action", "withdraw"): 0,
        ("raypd_planner_findings",): 2,
        ("raypd_planner_decided_timestamp_seconds",): 7.0,
    }


def test_without_a_forecast_that_is_over_there_is_no_error() -> None:
    plan = PlanRecord(7.0, PlannerMode.ACT, FleetCounts(1, 1), FleetCounts(1, 1), PlanAction.HOLD, "why")
    assert ("raypd_planner_forecast_error_ratio",) not in _samples(plan)
