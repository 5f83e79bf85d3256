"""The planner serves a day of load with fewer engines than a fixed fleet needs, and does not change to and fro."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.day_of_load import DAY, PLANNER, Day, changes_of, num_taken_back, planned, share_by_part
from benchmarks.simulated_cells import read_machine
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator
from cluster.planning.plan_record import PlanAction
from cluster.simulation.simulation_result import FleetPoint, Outcome
from tests.patience import TEST_S

OPS = Path("tests/data/llmservingsim/ops/RTXPRO6000/tp1")
SHAPE = Path("tests/data/llmservingsim/runs/RTXPRO6000/shape.json")


def test_the_day_has_a_ramp_a_burst_and_a_shift_to_long_answers() -> None:
    day = Day(hours=1.0, noon_per_s=4.0, seed=1)
    requests = list(day.requests())
    assert all(one.arrival_s <= later.arrival_s for one, later in pairwise(requests))

    def part(name: str) -> tuple[float, float, float]:
        """Requests per second, and the mean lengths."""
        seconds = 3600 * sum(later.at - one.at for one, later in pairwise(DAY) if one.part == name)
        found = [one for one in requests if day.part_at(one.arrival_s) == name]
        sums = sum(one.num_prompt_tokens for one in found), sum(one.num_output_tokens for one in found)
        return len(found) / seconds, sums[0] / len(found), sums[1] / len(found)

    night, noon, burst, answers = (part(name) for name in ("night", "noon", "burst", "answers"))
    assert night[0] == pytest.approx(0.15 * 4, rel=0.15)
    assert noon == pytest.approx((4.0, 5800, 150), rel=0.1)
    assert burst[0] > 6.0
    assert answers == pytest.approx((4.0, 500, 600), rel=0.1)


@pytest.mark.more
@pytest.mark.timeout(TEST_S)
def test_the_planner_needs_fewer_engine_hours_than_a_fixed_fleet_and_takes_nothing_back() -> None:
    machine, day = read_machine(OPS, SHAPE), Day(hours=0.4, noon_per_s=3.0, seed=1)
    config = PLANNER.model_copy(update={"interval_s": 15.0})

    found, planner = planned(machine, day, config, ClosedFormEstimator())
    # With three engines for the whole day 94 % of the requests meet the aims, and with two far fewer.
    assert found.engine_hours < 0.85 * 3 * found.result.duration_s / 3600
    # The burst is over before an engine has started; on the ramp some requests come while the next one starts.
    shares = share_by_part(day, found.result)
    expected = {"burst": 0.0, "ramp": 0.8}
    assert all(share >= expected.get(part, 0.9) for part, share in shares.items()), shares
    assert num_taken_back(found.result.fleet) == 0
    assert {one.outcome for one in found.result.requests} == {Outcome.COMPLETE}
    assert {record.action for record in planner.records} <= {PlanAction.HOLD, PlanAction.CHANGE}


def test_changes_that_are_soon_undone_are_counted() -> None:
    counts = [(0.0, 2, 0, 0), (10.0, 2, 0, 1), (70.0, 3, 0, 0), (100.0, 2, 0, 0), (900.0, 1, 1, 0), (1000.0, 2, 0, 0)]
    points = [FleetPoint(at_s, FleetCounts(both=both, prefill=prefill), n) for at_s, both, prefill, n in counts]

    # An engine started, and left 90 s later; then a role was changed and changed back, for both roles.
    assert num_taken_back(points) == 1 + 1 + 2
    assert num_taken_back(points, within_s=20.0) == 0
    assert [point.at_s for point in changes_of(points)] == [10.0, 100.0, 900.0, 1000.0]
