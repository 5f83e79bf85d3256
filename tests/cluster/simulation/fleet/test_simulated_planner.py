"""The planner brings a simulated cluster to what its load needs.

Tests of cluster/simulation/fleet/simulated_planner.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims
from cluster.planning.plan_record import PlanAction, PlanSettings
from cluster.routing.decision import RoutingMode
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.fleet.simulated_planner import SimulatedPlanner
from cluster.simulation.simulation_result import Outcome
from cluster.simulation.simulator import simulate
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.cluster.simulation.simulated_cluster import make_cluster

WINDOW_S = 5.0
NONE = RoleLimits(0, 0)
SETTINGS = PlanSettings(
    aims=PlanAims(ttft_s=2.0, itl_s=0.1, attainment=0.9),
    limits=FleetLimits(prefill=NONE, decode=NONE, max_engines=6),
    horizon_s=200.0,
    down_window_s=20.0,
    change_timeout_s=60.0,
    hold_s=20.0,
    quantile=0.9,
    num_requests=100,
    num_estimates=8,
)


def cluster(num_engines: int) -> ClusterSpec:
    return replace(make_cluster(["both"] * num_engines, num_blocks=2000), start_s=3.0, load_window_s=WINDOW_S)


def at_rates(*rates: tuple[float, float], num_prompt_tokens: int = 4000) -> Iterator[WorkloadRequest]:
    """Poisson arrivals: so many seconds at each rate."""
    draw, now_s, end_s, number = random.Random(3), 0.0, 0.0, 0
    for seconds, per_s in rates:
        end_s += seconds
        while (now_s := now_s + draw.expovariate(per_s)) < end_s:
            yield WorkloadRequest(f"r{number}", now_s, num_prompt_tokens, 20)
            number += 1
        now_s = end_s


def test_engines_come_with_the_load_and_leave_after_it() -> None:
    planner = SimulatedPlanner(SETTINGS, WINDOW_S, ClosedFormEstimator())

    result = simulate(cluster(1), at_rates((60.0, 1.0), (60.0, 7.0), (90.0, 1.0)), seed=1, control=planner)

    assert {one.outcome for one in result.requests} == {Outcome.COMPLETE}
    counts = [(point.at_s, point.serving.both) for point in result.fleet]
    most = max(count for _, count in counts)
    assert most >= 3
    assert all(count <= 2 for at_s, count in counts if at_s < 60.0)
    assert counts[-1][1] < most
    # Up and down once: the rules hold it back from changing to and fro.
    directions = [later - before for (_, before), (_, later) in pairwise(counts) if later != before]
    assert directions == sorted(directions, key=lambda step: step < 0)
    changes = [record for record in planner.records if record.action is PlanAction.CHANGE]
    assert [record.target for record in planner.records if record.action is not PlanAction.HOLD] == [
        record.target for record in changes
    ]


def test_a_fleet_that_has_no_load_yet_stays_as_it_is() -> None:
    planner = SimulatedPlanner(SETTINGS, WINDOW_S, ClosedFormEstimator())

    result = simulate(cluster(2), at_rates((4.0, 1.0)), seed=1, control=planner)

    assert [point.serving for point in result.fleet] == [FleetCounts(both=2)]
    assert {record.action for record in planner.records} <= {PlanAction.HOLD}


def test_a_role_changes_where_no_further_engine_is_allowed() -> None:
    limits = FleetLimits(both=NONE, max_engines=3)
    settings = msgspec.structs.replace(SETTINGS, limits=limits)
    # Links that carry handoffs have a measured bandwidth.
    spec = make_cluster(["prefill", "decode", "decode"], RoutingMode.DISAGGREGATE, num_blocks=2000)
    spec = replace(spec, start_s=3.0, load_window_s=WINDOW_S)
    planner = SimulatedPlanner(settings, WINDOW_S, ClosedFormEstimator())

    result = simulate(spec, at_rates((40.0, 2.0), (40.0, 5.0)), seed=1, control=planner)

    assert {point.serving for point in result.fleet} >= {FleetCounts(1, 2), FleetCounts(2, 1)}
    assert {one.outcome for one in result.requests} == {Outcome.COMPLETE}
    assert all(engine.held_s == pytest.approx(result.duration_s) for engine in result.engines)
