"""Runs the planner beside the controller's other rounds, and brings the cluster to its targets.

Every interval_s the ingresses tell their offered load, and a child process (planner_child.py) decides. In the mode
`act` every round takes the next steps towards the target, by the ways that operators' changes take: roles change as by
`raypd set-role`, and the wanted slots as by `raypd scale`, so engines without room wait as pending placement groups,
which Ray's autoscaler counts as demand.

What the planner remembers is part of the controller's saved state: a later controller goes on with a change under way.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

from actors.process.bounded_process import BoundedProcess, ProcessDied, ProcessLimits, ProcessTooSlow, ProcessUnusable
from cluster.config import ClusterConfig
from cluster.errors import EngineRefused, UnknownEngine
from cluster.planning.fleet_change import PlannedEngine, next_steps
from cluster.planning.fleet_counts import PLANNED_ROLES
from cluster.planning.offered_load import LoadHistory
from cluster.planning.plan_record import PlanAction, PlanInputs, PlanMemory, PlannerMode, PlanRecord
from cluster.planning.planner import PlanStep
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.journal import Journal
from cluster.pool.planning.planner_child import PlanTask, decode_step, encode_task
from cluster.reconciling.planned_engines import engine_speed, missing_engines, planned_engine, slots_after

logger = logging.getLogger(__name__)

_CHILD: Final = (sys.executable, "-m", "cluster.pool.planning.planner_child")
_LIMITS: Final = ProcessLimits(timeout_s=30.0, memory_mib=2048, max_answer_mib=16)
_TELLING_S: Final = 1.0
"""Ingresses tell a window this long after its end, so that all of their clocks have passed it."""


class TaskProcess(Protocol):
    """Answers tasks one after the other, as a BoundedProcess does."""

    def ask(self, task: bytes) -> bytes:
        """Return the answer. Raises ProcessTooSlow, ProcessDied, ProcessUnusable."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class PlannerRounds:
    """The planner of one cluster. Only the controller's event loop uses this object.

    record:             the newest decision; None before the first one
    memory:             what the planner remembers, for the saved state
    num_manual_changes: how often operators have changed the fleet
    """

    def __init__(
        self,
        config: ClusterConfig,
        fleet: EngineFleet,
        ingresses: IngressFleet,
        journal: Journal,
        save: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
        process: TaskProcess | None = None,
    ) -> None:
        """Start no process yet.

        save:      saves the controller's state
        on_change: begins the controller's next round at once
        process:   decides; None: the planner's own child process
        """
        self._config = config.planner
        self._routing_mode = config.routing.mode
        self._fleet = fleet
        self._ingresses = ingresses
        self._journal = journal
        self._save = save
        self._on_change = on_change
        gpus = [config.group(role).num_gpus * config.num_ranks(role) for role in PLANNED_ROLES]
        self._settings = config.planner.plan_settings(config.slo.aims, (gpus[0], gpus[1], gpus[2]))
        self._history = LoadHistory(config.planner.interval_s)
        self._process = process or BoundedProcess(_CHILD, (), _LIMITS, "plans the fleet")
        self._next_window = 0
        self.record: PlanRecord | None = None
        self.memory = PlanMemory()
        self.num_manual_changes = 0

    def note_manual_change(self) -> None:
        """Note that an operator has changed the wanted engines or a role."""
        self.num_manual_changes += 1

    async def look(self) -> None:
        """Decide if a window of load is over, and go on towards the target."""
        now_s = time.time()
        number = int((now_s - _TELLING_S) // self._config.interval_s)
        if number >= self._next_window:
            self._next_window = number + 1
            await self._tick(now_s)
        if self._config.mode is PlannerMode.ACT and self.memory.pending is not None:
            await self._approach()

    def close(self) -> None:
        """End the child process."""
        self._process.close()

    # -- deciding ------------------------------------------------------------------------------------------------

    async def _tick(self, now_s: float) -> None:
        told = await self._ingresses.offered_load(self._history.newest)
        for ingress, windows in told.items():
            self._history.take(ingress, windows)
        inputs = self._inputs(tuple(told), now_s)
        task = encode_task(PlanTask(inputs, self.memory, self._next_window, self._routing_mode))
        try:
            step = decode_step(await asyncio.to_thread(self._process.ask, task))
        except (ProcessTooSlow, ProcessDied, ProcessUnusable) as error:
            logger.warning("the planner has not decided", extra={"error": str(error)})
            self._journal.add(f"the planner has not decided: {error}")
            return
        if self.num_manual_changes != inputs.num_manual_changes:
            return  # An operator has changed the fleet meanwhile: the next tick decides about the fleet that there is.
        self._take(step)
        await self._save()

    def _take(self, step: PlanStep) -> None:
        self.record, self.memory = step.record, step.memory
        if self._config.mode is PlannerMode.ACT and step.record.action is not PlanAction.HOLD:
            self._journal.add(f"plan {step.record.target} ({step.record.change}): {step.record.reason}")

    def _inputs(self, ingresses: Iterable[str], now_s: float) -> PlanInputs:
        stats = {
            engine.engine_id: engine.stats for engine in self._fleet if engine.role in PLANNED_ROLES and engine.stats
        }
        return PlanInputs(
            now_s,
            self._config.interval_s,
            tuple(self._history.windows(ingresses, now_s)),
            tuple(self._engines()),
            self._fleet.switch_clock.times,
            self._settings,
            engine_speed(stats),
            self._config.mode,
            self.num_manual_changes,
        )

    def _engines(self) -> list[PlannedEngine]:
        fleet, wanted = self._fleet, set(self._fleet.wanted)
        there = [
            planned_engine(one.slot, one.role, one.state, one.stats, is_wanted=one.slot in wanted) for one in fleet
        ]
        alive = [one for one in there if one is not None]
        names = {one.engine_id for one in alive}
        return alive + missing_engines(fleet.wanted, [s for s in wanted if s.engine_id in names], fleet.roles)

    # -- acting --------------------------------------------------------------------------------------------------

    async def _approach(self) -> None:
        """Take the steps towards the target that are possible now."""
        assert self.memory.pending is not None
        steps = next_steps(self.memory.pending.target, self._engines(), self._settings.limits)
        if steps.is_empty:
            return
        for flip in steps.flips:
            try:
                await self._fleet.set_role(self._fleet.serving(flip.engine_id), flip.role, "the plan")
            except (UnknownEngine, EngineRefused) as error:
                # The next round tries again, or changes another engine, until the change is withdrawn.
                logger.warning("an engine has not changed its role", extra={"error": str(error)})
        wanted = slots_after(self._fleet.wanted, steps)
        for slot in set(wanted) - set(self._fleet.wanted):
            self._fleet.roles.pop(slot, None)
        if set(wanted) != set(self._fleet.wanted):
            self._fleet.wanted = wanted
            await self._save()
            self._on_change()
