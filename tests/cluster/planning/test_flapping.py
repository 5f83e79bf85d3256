"""Changes of the fleet are not soon undone, however uncertain the estimates are.

Tests of cluster/planning/planner.py and cluster/planning/flap_rules.py over time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planning.engine_work import EngineSpeed, Work, WorkPrices, mean_context
from cluster.planning.flap_rules import misses_clearly
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts
from cluster.planning.fleet_estimate import PlanAims, ServiceEstimate
from cluster.planning.load_bootstrap import DrawnLoad
from cluster.planning.plan_record import PlanAction, PlanRecord
from tests.cluster.planning.plan_setup import CHAT, REASONING, SETTINGS, fleet
from tests.cluster.planning.planned_cluster import Cluster

QUICK = msgspec.structs.replace(SETTINGS, num_requests=40, num_estimates=10)


class Shaky:
    """Estimates by the load of the busiest role, with an error of its own for each fleet and each tick."""

    name = "simulation"

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._load, self._work = DrawnLoad(), Work()

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Return about 0.9 where each role has a third more engines than its work."""
        if load is not self._load:
            self._load = load
            self._work = WorkPrices.at(speed, aims.itl_s, mean_context(load.requests)).work_of(load.requests)
        work = self._work
        prefill, decode = fleet.prefill + fleet.both / 2, fleet.decode + fleet.both / 2
        slack = min(prefill / work.prefill_s, decode / work.decode_s) * load.duration_s
        error = random.Random(f"{fleet} {load.duration_s}").gauss(0.0, self._sigma)
        return ServiceEstimate(min(max(0.9 + 0.3 * (slack - 1.33) + error, 0.0), 1.0))


def undone(records: list[PlanRecord]) -> list[PlanRecord]:
    """Return the changes that took a change of the number of engines, or of a role's, back within the window."""
    found: dict[float, PlanRecord] = {}
    changes = [record for record in records if record.action is not PlanAction.HOLD]
    counts: list[Callable[[FleetCounts], int]] = [lambda fleet: fleet.num_engines]
    counts += [partial(_of_role, role) for role in PLANNED_ROLES]
    for count in counts:
        steps = [(record, count(record.target) - count(record.current)) for record in changes]
        for (before, one), (record, other) in pairwise((record, step) for record, step in steps if step):
            if one * other < 0 and record.at_s - before.at_s < SETTINGS.down_window_s:
                found[record.at_s] = record
    return list(found.values())


def _of_role(role: object, fleet: FleetCounts) -> int:
    return int(getattr(fleet, str(role)))


def steps(draw: random.Random, *parts: tuple[int, float, float]) -> list[float]:
    """Return rates of windows: so many that go evenly from one rate to another, each up to 15 % off."""
    return [
        (first + (last - first) * index / num) * draw.uniform(0.85, 1.15)
        for num, first, last in parts
        for index in range(num)
    ]


@pytest.mark.parametrize("seed", [1, 4])
def test_on_a_ramp_no_change_is_undone(seed: int) -> None:
    cluster = Cluster(fleet(both=1), warm=[2.0] * 10, settings=QUICK, estimator=Shaky(0.03), num_kept=20)
    cluster.run(steps(random.Random(seed), (40, 2.0, 14.0), (10, 14.0, 14.0)))
    assert len(cluster.changes()) >= 3
    assert undone(cluster.records) == []


def test_an_engine_that_a_growing_load_will_need_does_not_leave() -> None:
    warm = [4.0 + 0.25 * index for index in range(20)]
    cluster = Cluster(fleet(3, 1), warm=warm, settings=QUICK, estimator=Shaky(0.0), num_kept=20)
    cluster.run([9.0 + 0.25 * index for index in range(20)])
    first = cluster.records[0].reason
    assert first == "1 prefill + 1 both might do now, and not as the load goes on"
    assert cluster.changes() == [(FleetCounts(3, 1), FleetCounts(2, 1))], "which is enough to the end"


@pytest.mark.more
@given(
    parts=st.lists(
        st.tuples(st.integers(2, 20), st.floats(2.0, 16.0), st.sampled_from([CHAT, REASONING])), min_size=2, max_size=6
    ),
    sigma=st.floats(0.0, 0.05),
)
@settings(max_examples=25, deadline=None)
def test_only_a_fleet_that_clearly_misses_the_aims_undoes_a_change(
    parts: list[tuple[int, float, tuple[int, int]]], sigma: float
) -> None:
    warm = [parts[0][1]] * 20
    cluster = Cluster(fleet(2, 2), warm=warm, settings=QUICK, estimator=Shaky(sigma), num_kept=20)
    for num_windows, rate, lengths in parts:
        cluster.run([rate if lengths == CHAT else rate / 4] * num_windows, lengths)
    for record in undone(cluster.records):
        [current] = [one for one in record.candidates if one.fleet == record.current]
        assert misses_clearly(ServiceEstimate(current.attainment), SETTINGS.aims.attainment, QUICK.num_requests)
