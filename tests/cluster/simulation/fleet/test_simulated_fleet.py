"""Engines of a simulated cluster start, drain, change their roles and leave as the reconciler decides.

Tests of cluster/simulation/fleet/simulated_fleet.py.
Tests of cluster/simulation/fleet/engine_reports.py.
Tests of cluster/simulation/fleet/fleet_member.py.
Tests of cluster/simulation/fleet/orders.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.planning.fleet_counts import FleetCounts
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig
from cluster.simulation.faults.fault import KillEngine
from cluster.simulation.fleet.orders import Order, ScaleRole, SetRole
from cluster.simulation.fleet.simulated_fleet import slot_of
from cluster.simulation.simulation_result import FleetPoint, Outcome, SimulationResult
from cluster.simulation.simulator import Simulation, simulate
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.cluster.simulation.simulated_cluster import constant_steps, make_cluster, make_workload

PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH


def evenly(num: int, per_s: float, num_output: int = 10) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{index}", index / per_s, 200, num_output) for index in range(num)]


def decoders_of(result: SimulationResult, begin_s: float, end_s: float) -> set[str | None]:
    return {one.decode_engine for one in result.requests if begin_s <= one.arrival_s < end_s}


def test_an_engine_that_starts_takes_gpus_at_once_and_serves_later() -> None:
    spec = replace(make_cluster(["both"]), start_s=3.0)

    result = simulate(spec, evenly(200, 20.0), seed=1, orders=[ScaleRole(2.0, BOTH, 2)])

    assert list(result.fleet) == [
        FleetPoint(0.0, FleetCounts(both=1), 0),
        FleetPoint(2.0, FleetCounts(both=1), 1),
        FleetPoint(5.0, FleetCounts(both=2), 0),
    ]
    assert decoders_of(result, 0.0, 5.0) == {"both-0"}
    assert decoders_of(result, 5.0, 10.0) == {"both-0", "both-1"}
    [first, second] = result.engines
    assert second.engine_id == "both-1"
    assert second.held_s == pytest.approx(first.held_s - 2.0)
    assert second.served_s == pytest.approx(first.served_s - 5.0)
    assert result.engine_seconds == pytest.approx(first.held_s + second.held_s)


def test_an_engine_that_drains_finishes_its_requests_and_gets_no_new_ones() -> None:
    spec = replace(make_cluster(["both", "both"], step_times=constant_steps(0.01)), look_s=0.5)
    offered = evenly(100, 20.0, num_output=150)

    result = simulate(spec, offered, seed=1, orders=[ScaleRole(2.0, BOTH, 1)])

    assert {one.outcome for one in result.requests} == {Outcome.COMPLETE}
    assert {one.num_attempts for one in result.requests} == {1}
    assert decoders_of(result, 0.0, 2.0) == {"both-0", "both-1"}
    assert decoders_of(result, 2.0, 9.0) == {"both-0"}
    last_s = max(one.end_s for one in result.requests if one.decode_engine == "both-1")
    gone = result.fleet[-1]
    assert gone.serving == FleetCounts(both=1)
    # The second of two idle looks, half a second apart, is the end.
    assert last_s + 0.5 < gone.at_s <= last_s + 1.0 + 1e-9
    assert result.engines[1].held_s == pytest.approx(gone.at_s)


def test_requests_of_an_engine_that_drains_too_long_go_on_elsewhere_and_lose_nothing() -> None:
    spec = replace(make_cluster(["both", "both"], step_times=constant_steps(0.01)), longest_drain_s=1.0)
    offered = evenly(30, 20.0, num_output=600)
    simulation = Simulation(spec, 1, keep_decisions=False, fast_forward=True)
    simulation.plan_order(ScaleRole(1.0, BOTH, 1))

    result = simulation.run(iter(offered), float("inf"))
    simulation.settle(1.0)

    assert {one.outcome for one in result.requests} == {Outcome.COMPLETE}
    assert {one.num_output_tokens for one in result.requests} == {600}
    moved = [one for one in result.requests if one.num_attempts == 2]
    assert moved
    assert {one.decode_engine for one in moved} == {"both-0"}
    assert simulation.num_held_blocks == 0
    simulation.check_integrity()


def test_a_role_change_takes_effect_with_the_next_request_and_breaks_none() -> None:
    spec = make_cluster(["prefill", "decode", "decode"], RoutingMode.DISAGGREGATE)
    offered = list(make_workload(160, 20.0, max_prompt=2000, max_output=100))

    result = simulate(spec, offered, seed=1, orders=[SetRole(4.0, "decode-2", PREFILL)])

    assert {one.outcome for one in result.requests} == {Outcome.COMPLETE}
    early = {one.prefill_engine for one in result.requests if one.arrival_s < 4.0}
    late = {one.prefill_engine for one in result.requests if one.arrival_s >= 4.0}
    assert early == {"prefill-0"}
    assert late >= {"prefill-0", "decode-2"}
    assert "decode-2" not in decoders_of(result, 4.5, 99.0)
    assert result.fleet[-1].serving == FleetCounts(prefill=2, decode=1)


def test_the_next_engine_of_a_slot_serves_in_the_role_that_was_set() -> None:
    spec = replace(make_cluster(["both", "decode", "decode"]), restart_s=2.0)
    orders: list[Order] = [SetRole(1.0, "decode-2", BOTH)]

    result = simulate(spec, evenly(100, 10.0), seed=1, orders=orders, faults=[KillEngine(3.0, "decode-2")])

    assert [(point.at_s, point.serving) for point in result.fleet] == [
        (0.0, FleetCounts(both=1, decode=2)),
        (1.0, FleetCounts(both=2, decode=1)),
        (4.0, FleetCounts(both=1, decode=1)),
        (5.0, FleetCounts(both=2, decode=1)),
    ]


def test_an_engine_that_dies_again_and_again_is_started_later_each_time() -> None:
    spec = replace(
        make_cluster(["both", "both"]),
        restart_s=1.0,
        restarts=RestartConfig(first_backoff_s=2.0, max_deaths=3, quarantine_s=1000.0),
    )
    kills = [KillEngine(at_s, "both-1") for at_s in (1.0, 5.0, 11.0)]

    result = simulate(spec, evenly(200, 10.0), seed=1, faults=kills)

    # A death is noticed after a second; the first restart is at once, the second one after the back-off.
    changes = [(point.at_s, point.serving.both) for point in result.fleet if not point.num_starting]
    assert changes == [(0.0, 2), (6.0, 1), (8.0, 2), (12.0, 1)]


def test_changes_of_the_fleet_are_the_same_with_many_decode_steps_at_once() -> None:
    spec = replace(make_cluster(["prefill", "decode", "both"]), start_s=1.0, longest_drain_s=1.0)
    orders: list[Order] = [
        SetRole(1.0, "both-2", DECODE),
        ScaleRole(1.5, DECODE, 2),
        ScaleRole(3.0, PREFILL, 0),
        SetRole(3.5, "decode-0", BOTH),
    ]

    many, single = (
        simulate(spec, make_workload(60, 12.0), seed=2, orders=orders, fast_forward=fast) for fast in (True, False)
    )

    assert many == single
    assert {one.outcome for one in many.requests} == {Outcome.COMPLETE}


@pytest.mark.parametrize("name", ["first", "prefill", "worker-1", "decode-x"])
def test_a_name_that_no_slot_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="give a role and a number, such as prefill-0"):
        slot_of(name)
