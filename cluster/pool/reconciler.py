"""What is wanted and what is there, in; what to do about it, out. Pure: no clock, no Ray.

A slot is one wanted engine, named by its role and number; it outlives the engines that fill it one after the other. An
engine that died leaves its slot, and the next one there gets a higher incarnation, which fences the old one's messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.engine_connection import EngineRole


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one engine."""

    role: EngineRole
    number: int

    @property
    def engine_id(self) -> str:
        """The engine's name in logs, tickets and `raypd` output."""
        return f"{self.role.value}-{self.number}"


class EngineState(StrEnum):
    """An engine as the controller sees it."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """The engine in a slot, whatever state it is in."""

    slot: Slot
    incarnation: int
    state: EngineState


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start an engine in this slot."""

    slot: Slot
    incarnation: int


@dataclass(frozen=True, slots=True)
class RemoveEngine:
    """Take the engine out of the membership and release its actor."""

    slot: Slot
    incarnation: int


Action = StartEngine | RemoveEngine


def wanted_slots(counts: Mapping[EngineRole, int]) -> list[Slot]:
    """Every slot of a cluster with so many engines of each role."""
    return [Slot(role, number) for role, count in counts.items() for number in range(count)]


def reconcile(
    wanted: Iterable[Slot], observed: Iterable[ObservedEngine], last_incarnations: Mapping[Slot, int]
) -> list[Action]:
    """The actions that bring what is observed closer to what is wanted.

    last_incarnations: the highest incarnation that was ever started in each slot
    A dead engine is removed first; its slot is filled by the next round, once nothing is left of it.
    """
    wanted_set = set(wanted)
    occupied = {engine.slot for engine in observed_list} if (observed_list := list(observed)) else set()
    removals: list[Action] = [
        RemoveEngine(engine.slot, engine.incarnation)
        for engine in observed_list
        if engine.state is EngineState.DEAD or engine.slot not in wanted_set
    ]
    starts: list[Action] = [
        StartEngine(slot, last_incarnations.get(slot, 0) + 1) for slot in sorted(wanted_set - occupied)
    ]
    return removals + starts
