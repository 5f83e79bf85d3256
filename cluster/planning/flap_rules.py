"""The rules that keep the planner from changing the fleet to and fro.

1. Fewer engines of a role only if the estimate of those that stay meets the aims (the planner estimates every target);
   fewer engines in all only if it does so for the load of a window of time, too, not only until an engine could start.
2. Fewer engines only down to the most that any tick of a window needed, and only once the planner has seen a window.
3. A change has to gain more over the horizon than it costs.
4. One change at a time, and a change that takes too long is withdrawn.
5. An aim that no number of engines attains is a finding, not a reason for more engines.
6. No data is not no load: without complete, recent windows nothing changes.
7. All roles change by one target within the limits; engines leave before others start (fleet_change.py).
8. What a change of the window has done is not undone, neither in the number of engines nor in that of a role, unless
   the fleet misses the aims by more than chance, and every fleet that undoes nothing misses them, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import ServiceEstimate
from cluster.planning.plan_record import MadeChange, PlanInputs, PlanMemory, Recommendation
from cluster.routing.engine_connection import EngineRole

_MAX_AGE_WINDOWS: Final = 3
"""The newest complete window may have ended this many windows ago."""
_NUM_SIGMAS: Final = 2.0
_MIN_BETTER: Final = 0.01


def find_staleness(inputs: PlanInputs) -> str:
    """Return why the load is not known, in words; "" if it is (rule 6)."""
    if not inputs.windows:
        return "no complete window of load has come from the ingresses"
    age_s = inputs.now_s - (inputs.windows[-1].number + 1) * inputs.window_s
    if age_s > _MAX_AGE_WINDOWS * inputs.window_s:
        return f"the newest complete window of load ended {age_s:.0f} s ago"
    return ""


def remembered(memory: PlanMemory, fleet: FleetCounts, now_s: float, window_s: float) -> PlanMemory:
    """Return the memory with this tick's recommendation, without what is older than the window."""
    kept = [one for one in memory.recommendations if one.at_s > now_s - window_s]
    changes = tuple(one for one in memory.changes if one.at_s > now_s - window_s)
    return msgspec.structs.replace(memory, recommendations=(*kept, Recommendation(now_s, fleet)), changes=changes)


def window_s(inputs: PlanInputs) -> float:
    """Return the window of rule 2: at least as long as the way down and back up takes."""
    return max(inputs.settings.down_window_s, inputs.times.start_s + inputs.times.drain_s)


def largest_recommended(memory: PlanMemory, limits: FleetLimits) -> FleetCounts:
    """Return the costliest fleet that a tick of the window has recommended; of equal ones the newest."""
    return max(reversed(memory.recommendations), key=lambda one: limits.cost(one.fleet)).fleet


def has_seen_window(memory: PlanMemory, inputs: PlanInputs) -> bool:
    """Whether the planner has ticked for a whole window, so that its recommendations cover one."""
    return memory.began_s is not None and inputs.now_s - memory.began_s >= window_s(inputs)


def agree(current: FleetCounts, target: FleetCounts, leaning: FleetCounts) -> bool:
    """Whether two ticks running want each role changed in one direction. leaning: the target of the tick before"""
    return all(
        _sign(leaning.of_role(role) - current.of_role(role)) == _sign(target.of_role(role) - current.of_role(role))
        for role in PLANNED_ROLES
    )


def undoes(changes: Sequence[MadeChange], current: FleetCounts, target: FleetCounts) -> bool:
    """Whether a target takes back what the newest change of the number of engines, or of a role's, has done (rule 8).

    changes: those of the window, the oldest first
    """
    counts: list[Callable[[FleetCounts], int]] = [lambda fleet: fleet.num_engines]
    counts += [partial(_of_role, role) for role in PLANNED_ROLES]
    for count in counts:
        steps = (count(change.after) - count(change.before) for change in reversed(changes))
        newest = next((step for step in steps if step), 0)
        if newest * (count(target) - count(current)) < 0:
            return True
    return False


def misses_clearly(estimate: ServiceEstimate, attainment: float, num_requests: int) -> bool:
    """Whether a fleet misses the wanted attainment by more than chance. num_requests: of the estimate"""
    error = math.sqrt(attainment * (1 - attainment) / num_requests)
    return estimate.attainment < attainment - _NUM_SIGMAS * error


def with_change(memory: PlanMemory, change: MadeChange) -> PlanMemory:
    """Return the memory with a change that has come about."""
    return msgspec.structs.replace(memory, changes=(*memory.changes, change))


def is_better(one: ServiceEstimate, other: ServiceEstimate) -> bool:
    """Whether one fleet's service is better than another's by more than chance, on the same arrivals."""
    difference = one.attainment - other.attainment
    if difference < _MIN_BETTER:
        return False
    if not one.met or len(one.met) != len(other.met):
        return True
    return difference > _NUM_SIGMAS * _standard_error(one.met, other.met)


def _standard_error(one: Sequence[bool], other: Sequence[bool]) -> float:
    apart = [int(a) - int(b) for a, b in zip(one, other, strict=True)]
    mean = sum(apart) / len(apart)
    return math.sqrt(sum((each - mean) ** 2 for each in apart) / len(apart) / len(apart))


def _of_role(role: EngineRole, fleet: FleetCounts) -> int:
    return fleet.of_role(role)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
