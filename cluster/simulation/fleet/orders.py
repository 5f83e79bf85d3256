"""Describes what operators and planners ask of a simulated fleet. Times are in seconds from the workload's begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cluster.routing.engine_connection import EngineRole
from cluster.simulation.fleet.simulated_fleet import SimulatedFleet
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress


@dataclass(frozen=True, slots=True)
class ScaleRole:
    """An operator wants so many engines of a role, as by `raypd scale`."""

    at_s: float
    role: EngineRole
    count: int


@dataclass(frozen=True, slots=True)
class SetRole:
    """An operator changes the role of an engine, as by `raypd set-role`; if the engine serves then."""

    at_s: float
    engine_id: str
    role: EngineRole


Order: TypeAlias = ScaleRole | SetRole


class FleetControl(Protocol):
    """Decides about a simulated fleet as time goes by."""

    @property
    def interval_s(self) -> float:
        """Seconds from one call of look() to the next."""
        ...

    def look(self, fleet: SimulatedFleet, ingresses: Sequence[SimulatedIngress], now_s: float) -> None:
        """Look at the cluster, and change what has to be changed."""
        ...
