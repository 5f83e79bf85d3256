"""A cluster that does what the planner wants, for tests of what the planner does over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from cluster.planning.fleet_change import PlannedEngine, next_steps
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator, FleetEstimator
from cluster.planning.plan_record import PlanAction, PlanInputs, PlanMemory, PlanRecord, PlanSettings
from cluster.planning.planner import plan
from cluster.routing.engine_connection import EngineRole
from tests.cluster.planning.plan_setup import SETTINGS, inputs, window, windows, with_role

SEEN: Final = PlanMemory(began_s=0.0, num_manual_changes=0)
"""The memory of a planner that has ticked for longer than a window."""


class Cluster:
    """A cluster that obeys the planner: engines start in two windows and drain in one."""

    def __init__(
        self,
        engines: Sequence[PlannedEngine],
        warm: Sequence[float] = (),
        settings: PlanSettings = SETTINGS,
        estimator: FleetEstimator | None = None,
        num_kept: int = 120,
    ) -> None:
        """Begin with these engines.

        warm: rates of the windows before the first tick; estimator: None: the closed form
        num_kept: windows that the planner is told
        """
        self.engines = list(engines)
        self.memory = SEEN
        self.load = list(windows(warm))
        self.told: list[PlanInputs] = []
        self.records: list[PlanRecord] = []
        self._settings = settings
        self._num_kept = num_kept
        self._estimator = ClosedFormEstimator() if estimator is None else estimator
        self._ages: dict[str, int] = {}
        self._num_started = 0

    def run(self, rates: Sequence[float], lengths: tuple[int, int] = (1000, 100)) -> None:
        """Serve windows with these rates, and tick after each of them."""
        for rate in rates:
            self.load.append(window(1000 + len(self.load), rate, lengths))
            self._age()
            told = inputs(self.load[-self._num_kept :], self.engines, settings=self._settings)
            self.told.append(told)
            step = plan(told, self.memory, self._estimator, seed=len(self.load))
            self.memory = step.memory
            self.records.append(step.record)
            if self.memory.pending is not None:
                self._follow(self.memory.pending.target)

    def changes(self) -> list[tuple[FleetCounts, FleetCounts]]:
        """Return the fleets before and after each change."""
        return [(one.current, one.target) for one in self.records if one.action is PlanAction.CHANGE]

    def _age(self) -> None:
        self.engines = [one for one in self.engines if not one.is_leaving]
        for index, engine in enumerate(self.engines):
            self._ages[engine.engine_id] = self._ages.get(engine.engine_id, 0) + 1
            self.engines[index] = msgspec.structs.replace(
                engine, is_serving=engine.is_serving or self._ages[engine.engine_id] >= 2
            )

    def _follow(self, target: FleetCounts) -> None:
        steps = next_steps(target, self.engines, self._settings.limits)
        for flip in steps.flips:
            self.engines = with_role(flip.engine_id, flip.role, self.engines)
        self.engines = [
            msgspec.structs.replace(one, is_leaving=one.is_leaving or one.engine_id in steps.removals)
            for one in self.engines
        ]
        for role in (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH):
            for _ in range(steps.starts.of_role(role)):
                self._num_started += 1
                self.engines.append(PlannedEngine(f"new-{self._num_started}", role, is_serving=False))
