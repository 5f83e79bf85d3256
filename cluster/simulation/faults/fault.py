"""Describes what goes wrong in a simulation, and when. Times are in seconds from the beginning of the workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class KillEngine:
    """An engine dies, with all that it has. A new incarnation starts if the cluster restarts engines."""

    at_s: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """An engine's process stands still, and goes on later as if nothing had happened."""

    at_s: float
    until_s: float
    engine_id: str


@dataclass(frozen=True, slots=True)
class SlowEngine:
    """An engine's steps take `factor` times as long as they should."""

    at_s: float
    until_s: float
    engine_id: str
    factor: float


@dataclass(frozen=True, slots=True)
class Partition:
    """The engines named cannot exchange anything with other engines; ingresses reach all of them."""

    at_s: float
    until_s: float
    engine_ids: frozenset[str]


Fault: TypeAlias = KillEngine | StopEngine | SlowEngine | Partition
