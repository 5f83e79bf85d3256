"""The planner in virtual time: what PlannerRounds does in the controller, without a process and without Ray.

Its decisions take no time. They are those of plan() and next_steps(), on what the simulated ingresses and engines tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cluster.planning.fleet_change import PlannedEngine, next_steps
from cluster.planning.fleet_counts import PLANNED_ROLES
from cluster.planning.fleet_estimate import FleetEstimator
from cluster.planning.offered_load import LoadHistory
from cluster.planning.plan_record import PlanInputs, PlanMemory, PlannerMode, PlanRecord, PlanSettings
from cluster.planning.planner import plan
from cluster.reconciling.planned_engines import engine_speed, missing_engines, planned_engine, slots_after
from cluster.simulation.fleet.fleet_member import FleetMember
from cluster.simulation.fleet.simulated_fleet import SimulatedFleet
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress

_LOOK_S: Final = 1.0
_TELLING_S: Final = 1.0
"""A window is told this long after its end, as in the controller."""


class SimulatedPlanner:
    """Decides in the mode `act`. A FleetControl; ClusterSpec.load_window_s has to be window_s.

    records: every decision, in order
    """

    interval_s = _LOOK_S

    def __init__(self, settings: PlanSettings, window_s: float, estimator: FleetEstimator) -> None:
        """window_s: seconds between two decisions, and of a window of load"""
        self._settings = settings
        self._window_s = window_s
        self._estimator = estimator
        self._history = LoadHistory(window_s)
        self._next_window = 0
        self._memory = PlanMemory()
        self.records: list[PlanRecord] = []

    def look(self, fleet: SimulatedFleet, ingresses: Sequence[SimulatedIngress], now_s: float) -> None:
        """Decide if a window of load is over, and go on towards the target."""
        number = int((now_s - _TELLING_S) // self._window_s)
        if number >= self._next_window:
            self._next_window = number + 1
            self._tick(fleet, ingresses, now_s)
        if self._memory.pending is not None:
            self._approach(fleet)

    def _tick(self, fleet: SimulatedFleet, ingresses: Sequence[SimulatedIngress], now_s: float) -> None:
        newest = self._history.newest
        names = [str(ingress.number) for ingress in ingresses]
        for name, ingress in zip(names, ingresses, strict=True):
            assert ingress.offered is not None, "the ingresses count what is offered"
            self._history.take(name, ingress.offered.since(newest.get(name, 0), now_s))
        inputs = PlanInputs(
            now_s,
            self._window_s,
            tuple(self._history.windows(names, now_s)),
            tuple(_engines(fleet)),
            fleet.switch_clock.times,
            self._settings,
            engine_speed({engine.descriptor.engine_id: engine.stats() for engine in fleet.serving}),
            PlannerMode.ACT,
        )
        step = plan(inputs, self._memory, self._estimator, seed=self._next_window)
        self._memory = step.memory
        self.records.append(step.record)

    def _approach(self, fleet: SimulatedFleet) -> None:
        """Take the steps towards the target that are possible now."""
        assert self._memory.pending is not None
        steps = next_steps(self._memory.pending.target, _engines(fleet), self._settings.limits)
        if steps.is_empty:
            return
        for flip in steps.flips:
            fleet.set_role(flip.engine_id, flip.role)
        wanted = slots_after(fleet.wanted, steps)
        if set(wanted) != set(fleet.wanted):
            fleet.want(wanted)


def _engines(fleet: SimulatedFleet) -> list[PlannedEngine]:
    wanted = set(fleet.wanted)
    there = [_planned(member, is_wanted=member.slot in wanted) for member in fleet]
    alive = [one for one in there if one is not None]
    names = {one.engine_id for one in alive}
    return alive + missing_engines(fleet.wanted, [s for s in wanted if s.engine_id in names], fleet.roles)


def _planned(member: FleetMember, *, is_wanted: bool) -> PlannedEngine | None:
    if member.state is None or member.role not in PLANNED_ROLES:
        return None
    stats = member.engine.stats() if member.engine is not None and member.is_serving else None
    return planned_engine(member.slot, member.role, member.state, stats, is_wanted=is_wanted)
