"""How far a rolling update is, which engine is next, and what holds it up. Pure, but for UpdateLog.

One engine at a time is out of service on account of the update, as with Kubernetes' `maxUnavailable: 1` without surge:
an engine that the update has taken out has to serve again, with the new model, before the next one goes. What was down
anyway does not hold the update up: a slot that finds no room, or one that keeps failing once the new model has proven
itself elsewhere. Such a slot gets the new model when it comes up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.pool.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.pool.journal import Journal
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig

_MANY_DEATHS: Final = 2


@dataclass(frozen=True, slots=True)
class RollingUpdate:
    """An update that is under way.

    num_updated: engines that serve the new version
    num_wanted:  engines that are to serve it
    next:        the engine that is to be replaced now; None: the update waits
    obstacles:   what it will wait for without limit, in words
    passed_over: slots that it goes on without, in words
    """

    model_version: int
    num_updated: int
    num_wanted: int
    next: ObservedEngine | None = None
    obstacles: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def is_as_far_as(self, other: RollingUpdate) -> bool:
        """Whether the other is the same update, with as much done, held up by nothing else."""
        return (
            (self.model_version, self.num_updated) == (other.model_version, other.num_updated)
            and set(other.obstacles) <= set(self.obstacles)
            and set(other.passed_over) <= set(self.passed_over)
        )

    def __str__(self) -> str:
        text = f"{self.num_updated} of {self.num_wanted} engines serve model version {self.model_version}"
        if self.obstacles:
            text += f"; the others stay as they are until this is solved: {', '.join(self.obstacles)}"
        if self.passed_over:
            text += f"; without {', '.join(self.passed_over)}"
        return text


class UpdateLog:
    """Writes into the journal what holds an update up: once, as long as the update gets no further."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._said: RollingUpdate | None = None

    def tell(self, update: RollingUpdate | None) -> None:
        """Look at the update as it is in this round."""
        if update is None or not (update.obstacles or update.passed_over):
            return
        if self._said is None or not self._said.is_as_far_as(update):
            self._journal.add(f"update: {update}")
            self._said = update


def find_update(
    wanted: Collection[Slot],
    observed: Collection[ObservedEngine],
    histories: Mapping[Slot, SlotHistory],
    policy: RestartConfig,
    now_s: float,
    model_version: int,
) -> RollingUpdate | None:
    """The update to this model version; None if no engine is left that serves another one."""
    engines = {engine.slot: engine for engine in observed if engine.slot in wanted}
    outdated = [
        engine
        for engine in engines.values()
        if engine.model_version != model_version and engine.state is EngineState.READY
    ]
    if not outdated:
        return None
    updated = [
        engine
        for engine in engines.values()
        if engine.model_version == model_version and engine.state is EngineState.READY
    ]
    is_waiting, obstacles, passed_over = False, [], []
    for slot in sorted(wanted):
        engine, history = engines.get(slot), histories.get(slot, SlotHistory())
        if engine is not None and engine.state is EngineState.READY:
            continue
        trouble = _trouble(engine, history, policy, now_s)
        was_taken_out = history.updated_to == model_version
        is_unproven = engine is None and not updated
        if trouble and not was_taken_out and not is_unproven:
            passed_over.append(f"{slot.engine_id} ({trouble})")
            continue
        is_waiting = True
        if trouble:
            obstacles.append(f"{slot.engine_id} ({trouble})")
    return RollingUpdate(
        model_version,
        len(updated),
        len(wanted),
        None if is_waiting else min(outdated, key=_turn),
        tuple(obstacles),
        tuple(passed_over),
    )


def _trouble(engine: ObservedEngine | None, history: SlotHistory, policy: RestartConfig, now_s: float) -> str:
    """Why a slot serves nothing and will not for long; empty if it is on its way."""
    if engine is not None:
        return "it finds no room" if engine.finds_no_room else ""
    if history.is_quarantined(now_s, policy):
        return f"in quarantine: {history.last_error}"
    return f"it keeps failing: {history.last_error}" if len(history.deaths_s) >= _MANY_DEATHS else ""


def _turn(engine: ObservedEngine) -> tuple[int, bool]:
    """Group by group: the prefill and the decode engine of a number follow each other, so that pairs of a version stay
    as long, and come as early, as can be. Prefill engines first: decode engines can do without them for a while.
    """
    return engine.slot.number, engine.slot.role is EngineRole.DECODE
