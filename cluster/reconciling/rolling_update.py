"""The state of a rolling update: how many engines are updated, which one is next, and what the update waits for.

The update takes one engine at a time out of service, as Kubernetes does with `maxUnavailable: 1` and no surge: the slot
has to serve again, with the new model, before the next engine is replaced. Slots that were down anyway do not hold the
update up: a slot without room, or one whose engines keep failing although the new model serves elsewhere. These slots
get the new model when they start again. This file is pure, except for UpdateLog.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig

_MANY_DEATHS: Final = 2


@dataclass(frozen=True, slots=True)
class RollingUpdate:
    """The state of an update that is under way.

    num_updated: number of engines that serve the new version
    num_wanted:  number of engines that should serve it
    next:        the engine to replace now; None while the update waits
    obstacles:   what the update waits for without limit, in words
    passed_over: slots that the update does not wait for, in words
    """

    model_version: int
    num_updated: int
    num_wanted: int
    next: ObservedEngine | None = None
    obstacles: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def is_as_far_as(self, other: RollingUpdate) -> bool:
        """Whether the other state has the same version and number of updated engines, and no further obstacle."""
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
    """The journal entries about what holds an update up: one entry for each state in which the update gets stuck."""

    def __init__(self, add: Callable[[str], None]) -> None:
        """add: adds an entry to the journal"""
        self._add = add
        self._said: RollingUpdate | None = None

    def tell(self, update: RollingUpdate | None) -> None:
        """Write an entry if the update is held up, and was not held up in the same way at the last entry."""
        if update is None or not (update.obstacles or update.passed_over):
            return
        if self._said is None or not self._said.is_as_far_as(update):
            self._add(f"update: {update}")
            self._said = update


def find_update(
    wanted: Collection[Slot],
    observed: Collection[ObservedEngine],
    histories: Mapping[Slot, SlotHistory],
    policy: RestartConfig,
    now_s: float,
    model_version: int,
) -> RollingUpdate | None:
    """Return the state of the update to a model version; None if no engine serves another version any more."""
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
    """Return why a slot has no serving engine and will have none soon; empty if its engine is starting or draining."""
    if engine is not None:
        return "it finds no room" if engine.finds_no_room else ""
    if history.is_quarantined(now_s, policy):
        return f"in quarantine: {history.last_error}"
    return f"it keeps failing: {history.last_error}" if len(history.deaths_s) >= _MANY_DEATHS else ""


def _turn(engine: ObservedEngine) -> tuple[int, bool]:
    """Return the sort key by which engines are replaced: by number, and for each number the decode engine last.

    So the prefill and the decode engine of a number follow each other, and pairs of both versions exist for most of the
    update. Decode engines can work without prefill engines for a while, so prefill engines are replaced first.
    """
    return engine.slot.number, engine.slot.role is EngineRole.DECODE
