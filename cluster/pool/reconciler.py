"""What is wanted and what is there, in; what to do about it and why, out. Pure: the clock is an argument.

A slot is one wanted engine, named by its role and number; it outlives the engines that fill it one after the other. An
engine that died leaves its slot, and the next one there gets a higher incarnation, which fences the old one's messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.engine_connection import EngineRole


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


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start an engine in this slot."""

    slot: Slot
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainEngine:
    """Give the engine no new work, and let what it has end."""

    slot: Slot
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveEngine:
    """Take the engine out of the membership and release its actor."""

    slot: Slot
    incarnation: int
    reason: str


Action = StartEngine | DrainEngine | RemoveEngine


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
    """What became of a slot's engines. deaths_s: on the clock that the reconciler is given."""

    last_incarnation: int = 0
    deaths_s: list[float] = field(default_factory=list)
    last_error: str = ""

    def add_death(self, now_s: float, error: str) -> None:
        """The slot's engine has died, or did not start."""
        self.deaths_s.append(now_s)
        self.last_error = error

    def not_before_s(self, now_s: float, policy: RestartPolicy) -> float:
        """When the slot may be filled again."""
        recent = [death_s for death_s in self.deaths_s if death_s > now_s - policy.window_s]
        self.deaths_s = recent or self.deaths_s[-1:]
        if self.is_quarantined(now_s, policy):
            return recent[-1] + policy.quarantine_s
        if len(recent) < 2:
            return 0.0
        backoff_s: float = policy.first_backoff_s * 2.0 ** (len(recent) - 2)
        return recent[-1] + min(policy.max_backoff_s, backoff_s)

    def is_quarantined(self, now_s: float, policy: RestartPolicy) -> bool:
        """Whether its engines have died too often to go on trying."""
        if not self.deaths_s or now_s >= self.deaths_s[-1] + policy.quarantine_s:
            return False
        window_start_s = self.deaths_s[-1] - policy.window_s
        return sum(death_s > window_start_s for death_s in self.deaths_s) >= policy.max_deaths


def wanted_slots(counts: Mapping[EngineRole, int]) -> list[Slot]:
    """Every slot of a cluster with so many engines of each role."""
    return [Slot(role, number) for role, count in counts.items() for number in range(count)]


def scaled_slots(wanted: Iterable[Slot], counts: Mapping[EngineRole, int]) -> list[Slot]:
    """The slots for so many engines of these roles; those of other roles stay.

    The lowest free numbers come first, the highest ones go first.
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
    policy: RestartPolicy,
    now_s: float,
    model_version: int = 1,
) -> list[Action]:
    """The actions that bring what is observed closer to what is wanted.

    A slot is filled by a later round than the one that removed its last engine: once nothing is left of it.
    model_version: the one that engines are to serve. Those of another one are replaced, one after the other.
    """
    wanted_set, observed_list = set(wanted), list(observed)
    occupied = {engine.slot for engine in observed_list}
    actions: list[Action] = []
    for engine in observed_list:
        if engine.state is EngineState.DEAD:
            actions.append(RemoveEngine(engine.slot, engine.incarnation, "it is dead"))
        elif engine.state is EngineState.DRAINED:
            actions.append(RemoveEngine(engine.slot, engine.incarnation, "it is drained"))
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
    if not actions and (outdated := _next_outdated(wanted_set, observed_list, model_version)) is not None:
        reason = f"model version {model_version} replaces version {outdated.model_version}"
        actions.append(DrainEngine(outdated.slot, outdated.incarnation, reason))
    return actions


def _next_outdated(wanted: set[Slot], observed: Iterable[ObservedEngine], model_version: int) -> ObservedEngine | None:
    """The engine that is next to be replaced by one of the newest model version, while all serve that should.

    Group by group: the prefill and the decode engine of a number follow each other, so that pairs of a version stay as
    long, and come as early, as can be. If an engine of the new version does not come up, the rest stays as it is.
    """
    ready = [engine for engine in observed if engine.state is EngineState.READY]
    if {engine.slot for engine in ready} != wanted:
        return None
    outdated = [engine for engine in ready if engine.model_version != model_version]
    # prefill engines first: decode engines can do without them for a while.
    return min(outdated, key=lambda engine: (engine.slot.number, engine.slot.role is EngineRole.DECODE), default=None)


def _start_reason(history: SlotHistory) -> str:
    if not history.last_incarnation:
        return "it is wanted"
    if history.last_error:
        return f"incarnation {history.last_incarnation} ended: {history.last_error}"
    return f"incarnation {history.last_incarnation} has left"
