"""The reconciler: compares the wanted engines with the observed ones, and decides what to do.

This file is pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.reconciling.rolling_update import find_update
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig


@dataclass(frozen=True, slots=True)
class StartEngine:
    """A decision: start an engine in this slot, as this incarnation."""

    slot: Slot
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainEngine:
    """A decision: give the engine no new requests, and let it finish the ones that it has.

    updates_to: the model version for which the engine is replaced; 0 if the drain has another reason
    """

    slot: Slot
    incarnation: int
    reason: str
    updates_to: int = 0


@dataclass(frozen=True, slots=True)
class RemoveEngine:
    """A decision: take the engine out of the membership, end its actor and release its resources."""

    slot: Slot
    incarnation: int
    reason: str


Action = StartEngine | DrainEngine | RemoveEngine


def wanted_slots(counts: Mapping[EngineRole, int]) -> list[Slot]:
    """Return the slots of a cluster with this number of engines of each role."""
    return [Slot(role, number) for role, count in counts.items() for number in range(count)]


def scaled_slots(wanted: Iterable[Slot], counts: Mapping[EngineRole, int]) -> list[Slot]:
    """Return the slots after a change of the number of engines of some roles; slots of other roles stay.

    New slots get the lowest free numbers, and slots with the highest numbers are dropped first.
    """
    slots = sorted(wanted)
    scaled = [slot for slot in slots if slot.role not in counts]
    for role, count in counts.items():
        kept = [slot for slot in slots if slot.role is role][:count]
        free = (Slot(role, number) for number in range(len(slots) + count) if Slot(role, number) not in kept)
        scaled += kept + [slot for slot, _ in zip(free, range(count - len(kept)), strict=False)]
    return sorted(scaled)


def reconcile(
    wanted: Iterable[Slot],
    observed: Iterable[ObservedEngine],
    histories: Mapping[Slot, SlotHistory],
    policy: RestartConfig,
    now_s: float,
    model_version: int = 1,
) -> list[Action]:
    """Return the actions that bring the observed engines closer to the wanted ones.

    The round that removes an engine does not start the next engine of its slot; a later round does.
    now_s:         the time, on the clock of the histories
    model_version: the version that engines should serve. Engines that serve another version are replaced one after the
                   other; see rolling_update.py.
    """
    wanted_set, observed_list = set(wanted), list(observed)
    occupied = {engine.slot for engine in observed_list}
    actions: list[Action] = []
    for engine in observed_list:
        if engine.state is EngineState.DEAD:
            actions.append(RemoveEngine(engine.slot, engine.incarnation, "it is dead"))
        elif engine.state is EngineState.DRAINED:
            actions.append(RemoveEngine(engine.slot, engine.incarnation, "it is drained"))
        elif engine.state is EngineState.PENDING and engine.model_version != model_version:
            reason = f"it has no room yet, and model version {model_version} replaces version {engine.model_version}"
            actions.append(RemoveEngine(engine.slot, engine.incarnation, reason))
        elif engine.slot in wanted_set or engine.state is EngineState.DRAINING:
            continue
        elif engine.state is EngineState.READY:
            actions.append(DrainEngine(engine.slot, engine.incarnation, "it is not wanted any more"))
        else:
            actions.append(RemoveEngine(engine.slot, engine.incarnation, "it is not wanted any more"))
    for slot in sorted(wanted_set - occupied):
        history = histories.get(slot, SlotHistory())
        if now_s >= history.not_before_s(now_s, policy):
            actions.append(StartEngine(slot, history.last_incarnation + 1, _start_reason(history)))
    if not actions:
        update = find_update(wanted_set, observed_list, histories, policy, now_s, model_version)
        if update is not None and (outdated := update.next) is not None:
            reason = f"model version {model_version} replaces version {outdated.model_version}"
            actions.append(DrainEngine(outdated.slot, outdated.incarnation, reason, model_version))
    return actions


def _start_reason(history: SlotHistory) -> str:
    if not history.last_incarnation:
        return "it is wanted"
    if history.last_error:
        return f"incarnation {history.last_incarnation} ended: {history.last_error}"
    return f"incarnation {history.last_incarnation} has left"
