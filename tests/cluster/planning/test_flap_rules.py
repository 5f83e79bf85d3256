"""The parts of the rules against changes to and fro. test_planner.py holds the planner to each rule."""

from __future__ import annotations

import msgspec

from cluster.planning.flap_rules import (
    agree,
    find_staleness,
    has_seen_window,
    is_better,
    largest_recommended,
    misses_clearly,
    remembered,
    undoes,
    window_s,
    with_change,
)
from cluster.planning.fleet_change import SwitchTimes
from cluster.planning.fleet_counts import FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import ServiceEstimate
from cluster.planning.plan_record import MadeChange, PlanMemory
from tests.cluster.planning.plan_setup import fleet, inputs, windows


def test_old_or_missing_windows_are_stale() -> None:
    told = inputs(windows([1.0] * 3), fleet(1, 1))
    assert find_staleness(told) == ""
    late = msgspec.structs.replace(told, now_s=told.now_s + 120)
    assert find_staleness(late) == "the newest complete window of load ended 121 s ago"
    assert find_staleness(inputs((), fleet(1, 1))) == "no complete window of load has come from the ingresses"


def test_recommendations_are_kept_for_the_window_and_the_costliest_counts() -> None:
    memory = PlanMemory()
    for at_s, engines in ((0.0, 9), (100.0, 4), (200.0, 7), (300.0, 2)):
        memory = remembered(memory, FleetCounts(both=engines), at_s, 250.0)
    assert largest_recommended(memory, FleetLimits()) == FleetCounts(both=7)


def test_the_window_is_as_long_as_the_way_down_and_back_up() -> None:
    told = inputs((), fleet(1, 1))
    assert window_s(told) == 300.0
    slow = msgspec.structs.replace(told, times=SwitchTimes(start_s=400.0, drain_s=100.0))
    assert window_s(slow) == 500.0


def test_a_window_has_been_seen_once_the_planner_is_as_old() -> None:
    told = inputs(windows([1.0]), fleet(1, 1))
    assert not has_seen_window(PlanMemory(), told)
    assert not has_seen_window(PlanMemory(began_s=told.now_s - 299), told)
    assert has_seen_window(PlanMemory(began_s=told.now_s - 300), told)


def test_two_ticks_agree_if_each_role_moves_in_one_direction() -> None:
    current = FleetCounts(2, 2)
    assert agree(current, FleetCounts(1, 3), FleetCounts(0, 4))
    assert not agree(current, FleetCounts(1, 3), FleetCounts(3, 1))
    assert not agree(current, FleetCounts(1, 3), FleetCounts(1, 2, 1))


def test_a_target_undoes_the_newest_change_of_a_number_only() -> None:
    changes = (
        MadeChange(0.0, FleetCounts(1, 3), FleetCounts(2, 2)),
        MadeChange(1.0, FleetCounts(2, 2), FleetCounts(2, 2, 1)),
    )
    current = FleetCounts(2, 2, 1)
    assert not undoes(changes, current, current)
    assert not undoes(changes, current, FleetCounts(3, 2, 1))
    assert undoes(changes, current, FleetCounts(2, 3, 1)), "decode engines have just become fewer"
    assert undoes(changes, current, FleetCounts(3, 2)), "an engine for both has just come"
    assert undoes(changes, current, FleetCounts(1, 2, 2)), "prefill engines have just become more"
    assert not undoes((), current, FleetCounts(1, 1))
    assert not undoes(changes[1:], current, FleetCounts(1, 3, 1)), "of the first change nothing is known any more"


def test_changes_are_forgotten_with_their_window() -> None:
    memory = with_change(PlanMemory(), MadeChange(100.0, FleetCounts(1, 1), FleetCounts(1, 2)))
    assert remembered(memory, FleetCounts(1, 2), 399.0, 300.0).changes == memory.changes
    assert remembered(memory, FleetCounts(1, 2), 400.0, 300.0).changes == ()


def test_a_few_requests_below_the_aim_are_no_clear_miss() -> None:
    assert not misses_clearly(ServiceEstimate(0.86), 0.9, 150)
    assert misses_clearly(ServiceEstimate(0.84), 0.9, 150)
    assert not misses_clearly(ServiceEstimate(0.84), 0.9, 60)


def test_a_difference_within_chance_is_no_better_service() -> None:
    some = tuple(i % 2 == 0 for i in range(100))
    others = tuple(i % 2 == 1 or i == 98 for i in range(100))
    assert not is_better(ServiceEstimate(0.51, others), ServiceEstimate(0.5, some))
    more = tuple(i % 2 == 0 or i < 20 for i in range(100))
    assert is_better(ServiceEstimate(0.6, more), ServiceEstimate(0.5, some)), "the same requests, and ten more"
    assert not is_better(ServiceEstimate(0.505), ServiceEstimate(0.5))
    assert is_better(ServiceEstimate(0.6), ServiceEstimate(0.5))
