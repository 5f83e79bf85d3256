"""Draw from a seed which faults come, when, and to whom; the same seed draws the same ones again.

What a fault does from outside is in assault.py.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ENGINE_TIMEOUT_S: Final = 2.0
"""The cluster's ingress.engine_timeout_s."""
HEARTBEAT_TIMEOUT_S: Final = 6.0
"""The cluster's heartbeat_timeout_s."""


class FaultKind(StrEnum):
    """The kinds of faults."""

    KILL_PREFILL = "kill prefill"
    KILL_DECODE = "kill decode"
    SHORT_STOP = "short stop"
    """SIGSTOP of an engine, and SIGCONT before anybody has given it up."""
    LONG_STOP = "long stop"
    """SIGCONT comes when its requests have gone elsewhere; the engine serves again."""
    STOP_UNTIL_REPLACED = "stop until replaced"
    """SIGCONT comes when the controller has replaced it."""
    CUT_CONTROL = "cut control"
    """An engine's control streams with other engines."""
    CUT_DATA = "cut data"
    """The data links on which an engine sends."""
    CUT_SESSION = "cut session"
    """The ingress's session with an engine."""
    KILL_CONTROLLER = "kill controller"
    KILL_INGRESS = "kill ingress"
    KILL_UNSTARTABLE_INGRESS = "kill ingress that cannot start"
    """Ray cannot start its next two incarnations: their environment fails."""
    BUSY_INGRESS = "busy ingress"
    """The ingress's event loop does one thing for longer than a heartbeat may take. It has to live on."""
    STEP_CLOCK = "step clock"
    """The wall clock of every process steps by an hour, forward or back."""


DEATHS: Final = frozenset({FaultKind.KILL_PREFILL, FaultKind.KILL_DECODE, FaultKind.STOP_UNTIL_REPLACED})
CUTS: Final = frozenset({FaultKind.CUT_CONTROL, FaultKind.CUT_DATA, FaultKind.CUT_SESSION})
ENDS_ATTEMPTS: Final = DEATHS | {FaultKind.LONG_STOP, FaultKind.CUT_SESSION}
"""After these, what was on the engine goes on elsewhere."""
OF_INGRESS: Final = frozenset({FaultKind.KILL_INGRESS, FaultKind.KILL_UNSTARTABLE_INGRESS, FaultKind.BUSY_INGRESS})
NEED_CALM: Final = DEATHS | OF_INGRESS | {FaultKind.LONG_STOP}
"""Come only while every engine serves: a request that loses two engines is given up, by design."""

_WEIGHTS: Final = {
    FaultKind.KILL_PREFILL: 8,
    FaultKind.KILL_DECODE: 8,
    FaultKind.SHORT_STOP: 20,
    FaultKind.LONG_STOP: 8,
    FaultKind.STOP_UNTIL_REPLACED: 2,
    FaultKind.CUT_CONTROL: 18,
    FaultKind.CUT_DATA: 18,
    FaultKind.CUT_SESSION: 8,
    FaultKind.KILL_CONTROLLER: 5,
    FaultKind.KILL_INGRESS: 4,
    FaultKind.KILL_UNSTARTABLE_INGRESS: 1,
    FaultKind.BUSY_INGRESS: 2,
    FaultKind.STEP_CLOCK: 6,
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many engines of each role the cluster has."""

    num_prefill: int
    num_decode: int

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """Prefill engines first."""
        counts = {"prefill": self.num_prefill, "decode": self.num_decode}
        return tuple(f"{role}-{number}" for role, count in counts.items() for number in range(count))

    def __str__(self) -> str:
        return f"{self.num_prefill}P+{self.num_decode}D"


TWO_AND_TWO: Final = Fleet(2, 2)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    engine_id: empty if it is none of an engine's
    delay_s:   after the fault before it
    stopped_s: how long an engine stays stopped, or an event loop busy, if that is the fault and nothing else ends it
    step_s:    how far the wall clock is from the true one from then on, if that is the fault
    """

    kind: FaultKind
    engine_id: str
    delay_s: float
    stopped_s: float = 0.0
    step_s: float = 0.0

    @property
    def needs_calm(self) -> bool:
        """Whether it waits until every engine serves."""
        return self.kind in NEED_CALM


def draw_faults(
    seed: int, num_faults: int, mean_delay_s: float, kinds: Collection[FaultKind], engine_ids: Sequence[str]
) -> list[Fault]:
    """So many faults, each kind at least once if there are enough, in an order of the seed's."""
    rng = random.Random(f"faults {seed}")
    allowed = [kind for kind in FaultKind if kind in kinds]
    drawn = rng.sample(allowed, min(num_faults, len(allowed)))
    drawn += rng.choices(allowed, [_WEIGHTS[kind] for kind in allowed], k=num_faults - len(drawn))
    rng.shuffle(drawn)
    return [_draw_fault(rng, kind, mean_delay_s, engine_ids) for kind in drawn]


def _draw_fault(rng: random.Random, kind: FaultKind, mean_delay_s: float, engine_ids: Sequence[str]) -> Fault:
    delay_s = rng.uniform(0.5, 1.5) * mean_delay_s
    if kind is FaultKind.STEP_CLOCK:
        return Fault(kind, "", delay_s, step_s=rng.choice([-3600.0, 3600.0, -40.0, 40.0, 0.0]))
    if kind is FaultKind.BUSY_INGRESS:
        return Fault(kind, "", delay_s, HEARTBEAT_TIMEOUT_S + rng.uniform(1.0, 3.0))
    if kind is FaultKind.KILL_CONTROLLER or kind in OF_INGRESS:
        return Fault(kind, "", delay_s)
    role = {FaultKind.KILL_PREFILL: "prefill", FaultKind.KILL_DECODE: "decode"}.get(kind, "")
    engine_id = rng.choice([engine_id for engine_id in engine_ids if engine_id.startswith(role)])
    if kind is FaultKind.SHORT_STOP:
        return Fault(kind, engine_id, delay_s, rng.uniform(0.05, 0.6) * ENGINE_TIMEOUT_S)
    if kind is FaultKind.LONG_STOP:
        return Fault(kind, engine_id, delay_s, ENGINE_TIMEOUT_S + rng.uniform(0.3, 1.5))
    return Fault(kind, engine_id, delay_s)
