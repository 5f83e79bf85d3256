"""Numbers of engines by role, and the limits that hold for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cluster.routing.engine_connection import EngineRole

PLANNED_ROLES = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH)
"""The roles that the planner gives. Engines that only encode images are left as they are."""


class FleetCounts(msgspec.Struct, frozen=True, order=True):
    """How many engines there are of each role that the planner gives."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @classmethod
    def of(cls, roles: Iterable[EngineRole]) -> FleetCounts:
        """Count these roles; those that the planner does not give are left out."""
        found = list(roles)
        return cls(*(found.count(role) for role in PLANNED_ROLES))

    @classmethod
    def from_mapping(cls, counts: Mapping[EngineRole, int]) -> FleetCounts:
        """Return these numbers; 0 for roles that are missing."""
        return cls(*(counts.get(role, 0) for role in PLANNED_ROLES))

    def of_role(self, role: EngineRole) -> int:
        """Return the number of engines of a role; 0 of a role that the planner does not give."""
        return int(getattr(self, role.value, 0))

    @property
    def num_engines(self) -> int:
        """All engines together."""
        return self.prefill + self.decode + self.both

    @property
    def can_serve(self) -> bool:
        """Whether some engine prefers to compute prompts, and some engine prefers to generate."""
        return bool((self.prefill or self.both) and (self.decode or self.both))

    def __add__(self, other: FleetCounts) -> FleetCounts:
        return FleetCounts(self.prefill + other.prefill, self.decode + other.decode, self.both + other.both)

    def __sub__(self, other: FleetCounts) -> FleetCounts:
        return FleetCounts(self.prefill - other.prefill, self.decode - other.decode, self.both - other.both)

    def __str__(self) -> str:
        parts = [f"{self.of_role(role)} {role.value}" for role in PLANNED_ROLES if self.of_role(role)]
        return " + ".join(parts) or "no engines"


class RoleLimits(msgspec.Struct, frozen=True):
    """The fewest and the most engines of one role."""

    least: int = 0
    most: int = 1024


class FleetLimits(msgspec.Struct, frozen=True):
    """The limits of a fleet.

    max_engines:      engines in all
    gpus_per_engine:  GPUs of an engine of each role, all of its ranks; engines without GPUs count as one each
    max_gpus:         GPUs in all; None: no such limit
    """

    prefill: RoleLimits = RoleLimits()
    decode: RoleLimits = RoleLimits()
    both: RoleLimits = RoleLimits()
    max_engines: int = 1024
    max_gpus: float | None = None
    gpus_per_engine: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def of_role(self, role: EngineRole) -> RoleLimits:
        """Return the limits of one role."""
        limits: RoleLimits = getattr(self, role.value)
        return limits

    def cost(self, fleet: FleetCounts) -> float:
        """Return the GPUs that a fleet takes; an engine without GPUs counts as one."""
        counts = (fleet.prefill, fleet.decode, fleet.both)
        return sum(count * (gpus or 1.0) for count, gpus in zip(counts, self.gpus_per_engine, strict=True))

    def has_room_for(self, fleet: FleetCounts) -> bool:
        """Whether a fleet is within the limits of all engines together."""
        return fleet.num_engines <= self.max_engines and (self.max_gpus is None or self.cost(fleet) <= self.max_gpus)

    def allows(self, fleet: FleetCounts) -> bool:
        """Whether a fleet can serve, and is within all limits."""
        is_within = all(
            self.of_role(role).least <= fleet.of_role(role) <= self.of_role(role).most for role in PLANNED_ROLES
        )
        return is_within and fleet.can_serve and self.has_room_for(fleet)
