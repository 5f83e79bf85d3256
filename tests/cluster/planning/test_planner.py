"""The planner: what it decides, and the seven rules that keep it from changing the fleet to and fro."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from cluster.planning.fleet_change import PlannedEngine, SwitchTimes
from cluster.planning.fleet_counts import FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims
from cluster.planning.offered_load import LoadWindow
from cluster.planning.plan_record import PlanAction, PlanMemory, PlannerMode
from cluster.planning.planner import PlanStep, plan
from cluster.routing.engine_connection import EngineRole
from tests.cluster.planning.plan_setup import (
    REASONING,
    SETTINGS,
    SPEED,
    WINDOW_S,
    fleet,
    inputs,
    windows,
)
from tests.cluster.planning.planned_cluster import SEEN, Cluster


def _plan(
    load: Sequence[LoadWindow], engines: Sequence[PlannedEngine], memory: PlanMemory, **changes: object
) -> PlanStep:
    return plan(inputs(load, engines, **changes), memory, ClosedFormEstimator(), seed=1)


def test_a_rising_load_is_met_before_it_comes() -> None:
    cluster = Cluster(fleet(1, 1), warm=[8.0] * 20)
    rates = [8 + 0.25 * i for i in range(60)]
    cluster.run(rates)
    # 105 ms of a prompt engine's time for each request
    computing = [one.serving.prefill + one.serving.both for one in cluster.told]
    assert all(num >= 0.105 * rate for num, rate in zip(computing, rates, strict=True))
    growth = [after.num_engines - before.num_engines for before, after in cluster.changes()]
    assert min(growth) >= 0
    assert sum(growth) >= 1


def test_a_constant_load_leads_to_one_fleet_and_stays_there() -> None:
    cluster = Cluster(fleet(4, 4), warm=[9.0] * 40)
    cluster.run([9.0] * 60)
    assert len(cluster.changes()) == 1
    assert cluster.records[-1].action is PlanAction.HOLD
    assert cluster.records[-1].current.num_engines < 4


def test_a_shift_from_prompts_to_answers_changes_roles_and_starts_no_engine() -> None:
    cluster = Cluster(fleet(2, 1), warm=[13.0] * 40)
    cluster.run([13.0] * 10)
    assert cluster.changes() == []
    cluster.run([3.0] * 8, REASONING)
    assert [before for before, _ in cluster.changes()] == [FleetCounts(2, 1)]
    [(_, after)] = cluster.changes()
    assert after.num_engines == 3
    assert after.decode + after.both >= 2


# -- the seven rules -------------------------------------------------------------------------------------------------


def test_rule_1_engines_leave_only_if_those_that_stay_would_meet_the_aims() -> None:
    # Two engines do 1.6 engine-seconds a second; one could not, however idle two seem.
    cluster = Cluster(fleet(2, 1), warm=[15.0] * 40)
    cluster.run([15.0] * 40)
    assert cluster.changes() == []
    record = cluster.records[-1]
    smaller = [one for one in record.candidates if one.cost < 3]
    assert smaller
    assert all(one.attainment < SETTINGS.aims.attainment for one in smaller)


def test_rule_2_engines_leave_only_down_to_the_most_that_the_window_needed() -> None:
    busy, quiet = [22.0] * 2, [4.0] * 4
    cluster = Cluster(fleet(3, 1), warm=(busy + quiet) * 8)
    cluster.run((busy + quiet) * 8)
    assert all(after.num_engines >= before.num_engines for before, after in cluster.changes())
    assert min(one.current.num_engines for one in cluster.records) >= 4
    cluster.run([4.0] * 60)
    assert cluster.records[-1].current.num_engines <= 2


def test_rule_2_a_planner_that_has_just_begun_removes_no_engine() -> None:
    load = windows([1.0] * 40)
    first = _plan(load, fleet(4, 4), PlanMemory())
    assert first.record.action is PlanAction.HOLD
    assert first.record.reason.endswith("and the planner has not yet seen a whole window of load")


def test_rule_3_a_role_change_that_costs_more_than_it_gains_is_not_made() -> None:
    load = [*windows([9.0] * 20), *windows([3.5] * 9, REASONING, 1020)]
    cheap = _plan(load, fleet(2, 1), _leaning(load, fleet(2, 1)), settings=_no_growth())
    assert cheap.record.action is PlanAction.CHANGE
    assert cheap.record.gain_s > cheap.record.switch_cost_s
    cached = fleet(2, 1, num_cached_tokens=30_000_000)
    dear = _plan(load, cached, _leaning(load, cached), settings=_no_growth())
    assert dear.record.action is PlanAction.HOLD
    assert "engine-seconds and cost" in dear.record.reason


def test_rule_4_one_change_at_a_time() -> None:
    load = windows([5.0 + i for i in range(20)])
    first = _plan(load, fleet(2, 1), SEEN)
    assert first.record.action is PlanAction.CHANGE
    starting = [*fleet(2, 1), PlannedEngine("prefill-2", EngineRole.PREFILL, is_serving=False)]
    later = windows([5.0 + i for i in range(22)])
    second = _plan(later, starting, first.memory)
    assert second.record.action is PlanAction.HOLD
    assert second.record.reason == f"the change to {first.record.target} is under way"
    assert second.record.target == first.record.target


def test_rule_4_a_change_that_takes_too_long_is_withdrawn_and_not_tried_at_once() -> None:
    load = windows([5.0 + i for i in range(20)])
    first = _plan(load, fleet(2, 1), SEEN)
    starting = [*fleet(2, 1), PlannedEngine("prefill-2", EngineRole.PREFILL, is_serving=False)]
    later = windows([5.0 + i for i in range(20)] + [24.0] * 12)
    late = _plan(later, starting, first.memory)
    assert late.record.action is PlanAction.WITHDRAW
    assert late.record.target == FleetCounts(2, 1)
    assert late.record.change.removals == ("prefill-2",)
    assert late.record.findings == (
        f"the change to {first.record.target} did not come about within 360 s, and is withdrawn",
    )
    after = _plan(windows([24.0] * 33), fleet(2, 1), late.memory)
    assert after.memory.pending is None
    assert "no room for" in after.record.reason
    much_later = _plan(windows([24.0] * 45), fleet(2, 1), after.memory)
    assert much_later.record.action is PlanAction.CHANGE


def test_rule_4_a_change_that_came_about_is_over() -> None:
    first = _plan(windows([5.0 + i for i in range(20)]), fleet(2, 1), SEEN)
    target = first.record.target
    there = fleet(target.prefill, target.decode, target.both)
    assert _plan(windows([24.0] * 21), there, first.memory).memory.pending is None


def test_rule_5_an_aim_that_no_engine_attains_is_a_finding_and_starts_none() -> None:
    aims = PlanAims(ttft_s=0.02, itl_s=0.02, attainment=0.9)
    settings = msgspec.structs.replace(SETTINGS, aims=aims)
    step = _plan(windows([6.0] * 40), fleet(2, 1), SEEN, settings=settings)
    assert step.record.action is PlanAction.HOLD
    assert step.record.target == FleetCounts(2, 1)
    assert "is not attainable: idle engines need 105 ms, and more engines do not help" in step.record.findings[0]


def test_rule_5_limits_that_are_too_low_are_a_finding() -> None:
    settings = msgspec.structs.replace(SETTINGS, limits=FleetLimits(max_engines=3))
    step = _plan(windows([40.0] * 40), fleet(2, 1), SEEN, settings=settings)
    assert step.record.action is PlanAction.HOLD
    assert any("is the best fleet within the limits" in finding for finding in step.record.findings)


def test_rule_6_no_data_is_not_no_load() -> None:
    nothing = _plan((), fleet(4, 4), SEEN)
    assert (nothing.record.action, nothing.record.target) == (PlanAction.HOLD, FleetCounts(4, 4))
    assert nothing.record.reason.startswith("the load is not known: no complete window")
    load = windows([9.0] * 40)
    told = inputs(load, fleet(4, 4))
    old = plan(msgspec.structs.replace(told, now_s=told.now_s + 600), SEEN, ClosedFormEstimator())
    assert old.record.action is PlanAction.HOLD
    assert "ended 601 s ago" in old.record.reason
    blind = _plan(load, fleet(4, 4), SEEN, speed=None)
    assert blind.record.reason == "no engine can predict its steps yet"


def test_rule_6_requests_of_which_none_ends_are_not_taken_for_no_load() -> None:
    load = [LoadWindow(number, num_offered=100) for number in range(1000, 1040)]
    step = _plan(load, fleet(4, 4), SEEN)
    assert step.record.action is PlanAction.HOLD
    assert step.record.reason == "requests came, and none has ended yet, so their work is not known"


def test_rule_6_a_known_load_of_nothing_lets_engines_leave() -> None:
    cluster = Cluster(fleet(3, 3))
    cluster.run([0.0] * 20)
    assert cluster.records[-1].current == FleetCounts(both=1)


def test_rule_7_all_roles_change_by_one_target_within_the_budget() -> None:
    limits = FleetLimits(max_engines=4)
    cluster = Cluster(fleet(3, 1), [20.0] * 20, msgspec.structs.replace(SETTINGS, limits=limits))
    cluster.run([20.0] * 5)
    cluster.run([7.0] * 20, REASONING)
    assert cluster.changes()
    assert all(limits.allows(after) for _, after in cluster.changes())
    assert all(one.current.num_engines <= 4 for one in cluster.records)


def test_a_fleet_beyond_the_limits_is_brought_back() -> None:
    step = _plan(windows([9.0] * 40), fleet(5, 5), SEEN, settings=_limited(FleetLimits(max_engines=4)))
    assert step.record.action is PlanAction.CHANGE
    assert step.record.target.num_engines <= 4


# -- operators, restarts, modes --------------------------------------------------------------------------------------


def test_a_change_by_an_operator_ends_the_planners_own_and_stands_for_a_while() -> None:
    load = windows([5.0 + i for i in range(20)])
    first = _plan(load, fleet(2, 1), SEEN)
    scaled = fleet(4, 2)
    second = _plan(load, scaled, first.memory, num_manual_changes=1)
    assert second.record.action is PlanAction.HOLD
    assert second.record.target == FleetCounts(4, 2)
    assert second.memory.pending is None
    assert second.record.findings == (
        f"an operator has changed the fleet, so the change to {first.record.target} is given up",
    )
    assert second.record.reason == "an operator has changed the fleet, and that stands for a while"
    later = _plan(windows([5.0 + i for i in range(20)] + [60.0] * 6), scaled, second.memory, num_manual_changes=1)
    assert later.record.action is PlanAction.CHANGE


def test_a_successor_goes_on_with_the_change_under_way() -> None:
    first = _plan(windows([5.0 + i for i in range(20)]), fleet(2, 1), SEEN)
    restored = msgspec.json.decode(msgspec.json.encode(first.memory), type=PlanMemory)
    starting = [*fleet(2, 1), PlannedEngine("prefill-2", EngineRole.PREFILL, is_serving=False)]
    step = plan(inputs((), starting), restored, ClosedFormEstimator())
    assert step.record.action is PlanAction.HOLD
    assert step.record.target == first.record.target, "even before the ingresses have told the load again"
    assert step.memory.pending == first.memory.pending


def test_a_successor_withdraws_what_is_overdue_even_without_data() -> None:
    first = _plan(windows([5.0 + i for i in range(20)]), fleet(2, 1), SEEN)
    told = inputs((), fleet(2, 1))
    late = plan(msgspec.structs.replace(told, now_s=first.record.at_s + 301), first.memory, ClosedFormEstimator())
    assert late.record.action is PlanAction.WITHDRAW
    assert late.memory.pending is None


def test_advice_is_repeated_and_nothing_is_pending() -> None:
    load = windows([5.0 + i for i in range(20)])
    first = _plan(load, fleet(2, 1), SEEN, mode=PlannerMode.ADVISE)
    second = _plan(windows([5.0 + i for i in range(21)]), fleet(2, 1), first.memory, mode=PlannerMode.ADVISE)
    assert (first.record.action, second.record.action) == (PlanAction.CHANGE, PlanAction.CHANGE)
    assert first.memory.pending is None


def test_the_record_says_how_far_the_last_forecast_was_off() -> None:
    cluster = Cluster(fleet(3, 2), warm=[9.0] * 10)
    cluster.run([9.0] * 10)
    assert cluster.records[-1].forecast.last_error == pytest.approx(0.0, abs=1e-6)
    cluster.run([18.0] * 6)
    errors = [one.forecast.last_error for one in cluster.records[10:]]
    assert max(one for one in errors if one is not None) == pytest.approx(1.0, abs=0.05)
    assert len(cluster.memory.forecasts) < 10


def test_a_speed_that_is_hardly_known_is_a_finding() -> None:
    rough = _plan(windows([9.0] * 40), fleet(2, 1), SEEN, speed=msgspec.structs.replace(SPEED, sigma=0.6))
    assert "engines predict their steps only to 60%, so the plan is rough" in rough.record.findings


def test_equal_arguments_give_equal_records() -> None:
    load = windows([5.0 + i for i in range(20)])
    assert _plan(load, fleet(2, 1), SEEN) == _plan(load, fleet(2, 1), SEEN)


def test_the_record_names_the_bound_that_no_fleet_beats() -> None:
    record = _plan(windows([9.0] * 40), fleet(2, 1), SEEN).record
    work = record.forecast.prefill.high + record.forecast.decode.high
    assert record.least_engines - 1 < work <= record.least_engines


def _leaning(load: Sequence[LoadWindow], engines: Sequence[PlannedEngine]) -> PlanMemory:
    """Return the memory after the tick before the newest window."""
    return _plan(load[:-1], engines, SEEN, settings=_no_growth()).memory


def _limited(limits: FleetLimits) -> object:
    return msgspec.structs.replace(SETTINGS, limits=limits)


def _no_growth() -> object:
    return _limited(FleetLimits(max_engines=3))


def test_the_time_of_a_start_reaches_into_the_forecast() -> None:
    ramp = windows([2.0 + 0.5 * i for i in range(40)])
    soon = _plan(ramp, fleet(2, 1), SEEN).record.forecast.prefill.value
    late = _plan(ramp, fleet(2, 1), SEEN, times=SwitchTimes(start_s=20 * WINDOW_S, drain_s=10.0))
    assert late.record.forecast.prefill.value > soon
