"""Slots, the engines in them, and what became of earlier ones. Pure: the clock is an argument.

A slot is one wanted engine, named by its role and number; it outlives the engines that fill it one after the other. An
engine that died leaves its slot, and the next one there gets a higher incarnation, which fences the old one's messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cluster.routing.engine_connection import EngineRole


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one engine. role: the one that its engines begin in."""

    role: EngineRole
    number: int

    @property
    def engine_id(self) -> str:
        """The engine's name in logs, tickets and `raypd` output."""
        return f"{self.role.value}-{self.number}"


class EngineState(StrEnum):
    """An engine as the controller sees it."""

    PENDING = "pending"
    """It waits for room in the Ray cluster."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It gets no new work."""
    DRAINED = "drained"
    """It has no work left, or no time."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """The engine in a slot, whatever state it is in."""

    slot: Slot
    incarnation: int
    state: EngineState
    model_version: int = 1
    finds_no_room: bool = False
    """Whether it has been PENDING for long."""


_LONGEST_ROUND_S: Final = 60.0
_MAX_DOUBLINGS: Final = 60
"""More make no difference to a wait that is bounded, and a float has no room for 1024."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a slot is tried again. Times are in seconds.

    An engine's first death in window_s is followed by a start at once, each further one by a wait that doubles from
    first_backoff_s up to max_backoff_s. After max_deaths within window_s the slot is quarantined for quarantine_s.
    """

    window_s: float = 600.0
    first_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    max_deaths: int = 5
    quarantine_s: float = 600.0


@dataclass(slots=True)
class SlotHistory:
    """The history of a slot's engines. deaths_s: oldest first, on the clock that the reconciler is given.

    updated_to: the model version for which an update took the slot's engine out of service last; 0: none

    Invariant: questions change nothing. deaths_s holds those within window_s of the last one, and no others: whether
    that one was one too many is known for as long as the quarantine lasts, however long that is.
    """

    last_incarnation: int = 0
    deaths_s: list[float] = field(default_factory=list)
    last_error: str = ""
    updated_to: int = 0

    def add_death(self, now_s: float, error: str, policy: RestartPolicy) -> None:
        """The slot's engine has died, or did not start."""
        self.deaths_s = sorted([*_within(policy.window_s, _until(now_s, self.deaths_s), now_s), now_s])
        self.last_error = error

    def forgive(self) -> None:
        """Let the next try come at once."""
        self.deaths_s = []

    def not_before_s(self, now_s: float, policy: RestartPolicy) -> float:
        """When the slot may be filled again."""
        deaths_s = _until(now_s, self.deaths_s)
        if self.is_quarantined(now_s, policy):
            return deaths_s[-1] + policy.quarantine_s
        recent = _within(policy.window_s, deaths_s, now_s)
        if len(recent) < 2:
            return 0.0
        num_doublings = min(len(recent) - 2, _MAX_DOUBLINGS)
        return recent[-1] + min(policy.max_backoff_s, policy.first_backoff_s * 2.0**num_doublings)

    def is_quarantined(self, now_s: float, policy: RestartPolicy) -> bool:
        """Whether its engines have died too often to go on trying."""
        deaths_s = _until(now_s, self.deaths_s)
        if not deaths_s or now_s >= deaths_s[-1] + policy.quarantine_s:
            return False
        return len(_within(policy.window_s, deaths_s, deaths_s[-1])) >= policy.max_deaths


def _within(window_s: float, deaths_s: Iterable[float], end_s: float) -> list[float]:
    return [death_s for death_s in deaths_s if death_s > end_s - window_s]


def _until(now_s: float, deaths_s: Iterable[float]) -> list[float]:
    """Leave out deaths in the future: the clock has been set back. One that came after a round had begun counts."""
    return [death_s for death_s in deaths_s if death_s <= now_s + _LONGEST_ROUND_S]
