"""Slots, the engines in them, and their histories. Pure: the clock is an argument.

A slot is one wanted engine, named by its role and number. An engine that has died leaves its slot, and the next engine
of the slot gets a higher incarnation number, by which messages of the earlier one are recognized and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One wanted engine. role: the role in which the slot's engines start"""

    role: EngineRole
    number: int

    @property
    def engine_id(self) -> str:
        """The engine's name in logs, tickets and `raypd` output."""
        return f"{self.role.value}-{self.number}"


class EngineState(StrEnum):
    """The state of an engine in the controller."""

    PENDING = "pending"
    """The engine waits for room in the Ray cluster."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """The engine finishes its requests and gets no new ones."""
    DRAINED = "drained"
    """The engine has finished its requests, or the time for the drain is over."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """The engine in a slot, as last observed."""

    slot: Slot
    incarnation: int
    state: EngineState
    model_version: int = 1
    finds_no_room: bool = False
    """Whether the engine has been PENDING for long."""


_LONGEST_ROUND_S: Final = 60.0
_MAX_DOUBLINGS: Final = 60
"""The bound on the exponent of the backoff: 2.0**1024 is not a float, and the wait itself is bounded anyway."""


@dataclass(slots=True)
class SlotHistory:
    """The history of a slot's engines.

    deaths_s:   the times of deaths, oldest first, on the reconciler's clock
    last_error: why the last engine died or did not start
    updated_to: the model version for which an update took the slot's engine out of service last; 0: none

    Invariant: deaths_s holds the deaths within window_s before the last one, and no others. Only add_death() drops old
    ones, so a quarantine that is longer than window_s is still known while it lasts.
    """

    last_incarnation: int = 0
    deaths_s: list[float] = field(default_factory=list)
    last_error: str = ""
    updated_to: int = 0

    def add_death(self, now_s: float, error: str, policy: RestartConfig) -> None:
        """Note that the slot's engine has died, or did not start."""
        self.deaths_s = sorted([*_within(policy.window_s, _until(now_s, self.deaths_s), now_s), now_s])
        self.last_error = error

    def forgive(self) -> None:
        """Forget the deaths, so that the next engine starts at once."""
        self.deaths_s = []

    def not_before_s(self, now_s: float, policy: RestartConfig) -> float:
        """Return the time before which no new engine may start in the slot; 0 for at once.

        After an engine's first death within window_s, the next engine starts at once. After each further death it
        starts with a delay, which doubles from first_backoff_s up to max_backoff_s.
        """
        deaths_s = _until(now_s, self.deaths_s)
        if self.is_quarantined(now_s, policy):
            return deaths_s[-1] + policy.quarantine_s
        recent = _within(policy.window_s, deaths_s, now_s)
        if len(recent) < 2:
            return 0.0
        num_doublings = min(len(recent) - 2, _MAX_DOUBLINGS)
        return recent[-1] + min(policy.max_backoff_s, policy.first_backoff_s * 2.0**num_doublings)

    def is_quarantined(self, now_s: float, policy: RestartConfig) -> bool:
        """Whether the slot's engines have died so often that none is started for a while."""
        deaths_s = _until(now_s, self.deaths_s)
        if not deaths_s or now_s >= deaths_s[-1] + policy.quarantine_s:
            return False
        return len(_within(policy.window_s, deaths_s, deaths_s[-1])) >= policy.max_deaths


def _within(window_s: float, deaths_s: Iterable[float], end_s: float) -> list[float]:
    return [death_s for death_s in deaths_s if death_s > end_s - window_s]


def _until(now_s: float, deaths_s: Iterable[float]) -> list[float]:
    """Leave out deaths in the future, which remain when the clock is set back.

    A death may be up to a minute after now_s, since it may have occurred after the round began.
    """
    return [death_s for death_s in deaths_s if death_s <= now_s + _LONGEST_ROUND_S]
