"""The fleets that the planner considers."""

from __future__ import annotations

import pytest

from cluster.planning.candidate_fleets import candidates, clamped, neighbours, perfect_bound, seeds
from cluster.planning.engine_work import Work
from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits

WORK = Work(prefill_s=2.0, decode_s=4.0)


@pytest.mark.parametrize(("work", "engines"), [(Work(2.1, 4.0), 7), (Work(2.0, 4.0), 6), (Work(), 1)])
def test_no_fleet_does_more_than_an_engine_second_a_second(work: Work, engines: int) -> None:
    assert perfect_bound(work) == engines


def test_the_seeds_have_the_usual_load() -> None:
    assert list(seeds(WORK)) == [FleetCounts(prefill=3, decode=6), FleetCounts(both=9)]


def test_the_seeds_the_current_fleet_and_their_neighbours_are_considered() -> None:
    limits, current = FleetLimits(max_engines=9), FleetCounts(2, 3)
    found = candidates(WORK, current, limits)
    assert {current, FleetCounts(3, 6), FleetCounts(both=9), FleetCounts(3, 5), FleetCounts(2, 4)} <= set(found)
    assert len(found) == len(set(found)) < 40
    assert all(limits.allows(fleet) for fleet in found)


def test_a_neighbour_is_one_role_change_or_one_engine_away() -> None:
    assert set(neighbours(FleetCounts(1, 1))) == {
        FleetCounts(2, 1),
        FleetCounts(1, 2),
        FleetCounts(1, 1, 1),
        FleetCounts(0, 1),
        FleetCounts(1, 0),
        FleetCounts(0, 2),
        FleetCounts(0, 1, 1),
        FleetCounts(2, 0),
        FleetCounts(1, 0, 1),
    }


def test_a_fleet_beyond_the_limits_is_no_candidate() -> None:
    assert FleetCounts(5, 5) not in candidates(WORK, FleetCounts(5, 5), FleetLimits(max_engines=9))


def test_a_fleet_is_brought_within_the_limits_in_proportion() -> None:
    assert clamped(FleetCounts(6, 12), FleetLimits(max_engines=6)) == FleetCounts(2, 4)
    assert clamped(FleetCounts(1, 30), FleetLimits(max_engines=6)) == FleetCounts(1, 5)
    assert clamped(FleetCounts(2, 2), FleetLimits(decode=RoleLimits(3, 8))) == FleetCounts(2, 3)
