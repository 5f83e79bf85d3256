"""Proposes fleets that are worth an estimate: a few around the bound that no fleet can beat.

A perfect system would need ceil(work) engines. Real ones need more, since work comes unevenly; how much more is what
the estimates of the candidates tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from cluster.planning.engine_work import Work
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts, FleetLimits
from cluster.routing.engine_connection import EngineRole

_USUAL_LOAD: Final = 0.7
"""The load of an engine at which waits are usually still short: the seeds have it."""


def perfect_bound(work: Work) -> int:
    """Return the fewest engines that can do the work, whatever the rest of the system does; at least 1."""
    return max(math.ceil(work.total_s), 1)


def seeds(work: Work) -> Iterator[FleetCounts]:
    """Yield a fleet of two roles and a fleet of one role, each with the usual load."""
    prefill, decode = (max(math.ceil(part / _USUAL_LOAD), 1) for part in (work.prefill_s, work.decode_s))
    yield FleetCounts(prefill=prefill, decode=decode)
    yield FleetCounts(both=max(math.ceil(work.total_s / _USUAL_LOAD), 1))


def candidates(work: Work, current: FleetCounts, limits: FleetLimits) -> list[FleetCounts]:
    """Return the fleets worth a first look that the limits allow: the seeds, the current one, and their neighbours.

    A current fleet beyond the limits is left out, so that the planner brings it back within them.
    """
    begin = [*(clamped(seed, limits) for seed in seeds(work)), current]
    found = dict.fromkeys([*begin, *(near for fleet in begin for near in neighbours(fleet))])
    return [fleet for fleet in found if limits.allows(fleet)]


def neighbours(fleet: FleetCounts) -> Iterator[FleetCounts]:
    """Yield what one role change, one engine more, or one engine less makes of a fleet."""
    for role in PLANNED_ROLES:
        yield fleet + one_of(role)
        if fleet.of_role(role):
            yield fleet - one_of(role)
            yield from (fleet - one_of(role) + one_of(other) for other in PLANNED_ROLES if other is not role)


def clamped(fleet: FleetCounts, limits: FleetLimits) -> FleetCounts:
    """Return the fleet within the limits that is nearest in proportion; the smallest one if the limits are too low."""
    within = FleetCounts(
        *(
            min(max(fleet.of_role(role), limits.of_role(role).least), limits.of_role(role).most)
            for role in PLANNED_ROLES
        )
    )
    while not limits.has_room_for(within):
        shrinkable = [role for role in PLANNED_ROLES if within.of_role(role) > _least(within, role, limits)]
        if not shrinkable:
            return within
        within -= one_of(max(shrinkable, key=lambda role: within.of_role(role) / max(fleet.of_role(role), 1)))
    return within


def one_of(role: EngineRole) -> FleetCounts:
    """Return the counts of one engine of a role."""
    return FleetCounts.from_mapping({role: 1})


def _least(fleet: FleetCounts, role: EngineRole, limits: FleetLimits) -> int:
    needed = 0 if fleet.both and role is not EngineRole.BOTH else min(fleet.of_role(role), 1)
    return max(limits.of_role(role).least, needed)
