"""The way from one fleet to another: role changes first, then removals, then starts; and what that costs.

A role change is the cheapest way to another fleet: the engine keeps its weights, and what it has cached stays until
other requests displace it. A target is one value for all roles, and it is reached within the budget: an engine starts
only once those that leave have made room, so there are never more engines than the limits allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cluster.planning.candidate_fleets import one_of
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts, FleetLimits
from cluster.routing.engine_connection import EngineRole


class PlannedEngine(msgspec.Struct, frozen=True):
    """An engine as the planner sees it.

    role:              the role in which it serves now
    is_serving:        False while it starts, or waits for room
    is_leaving:        whether it drains: it takes room and serves no new requests
    num_streams:       requests that decode there
    num_cached_tokens: tokens whose KV it keeps only for later requests
    """

    engine_id: str
    role: EngineRole
    is_serving: bool = True
    is_leaving: bool = False
    num_streams: int = 0
    num_cached_tokens: int = 0


class RoleFlip(msgspec.Struct, frozen=True):
    """The change of one engine's role."""

    engine_id: str
    role: EngineRole

    def __str__(self) -> str:
        return f"{self.engine_id} becomes {self.role.value}"


class FleetChange(msgspec.Struct, frozen=True):
    """The steps of a change, in this order. removals: ids of engines; starts: engines to start by role"""

    flips: tuple[RoleFlip, ...] = ()
    removals: tuple[str, ...] = ()
    starts: FleetCounts = FleetCounts()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be done."""
        return not (self.flips or self.removals or self.starts.num_engines)

    def __str__(self) -> str:
        parts = [str(flip) for flip in self.flips] + [f"{engine_id} leaves" for engine_id in self.removals]
        return ", ".join(parts + ([f"{self.starts} start"] if self.starts.num_engines else [])) or "nothing"


class SwitchTimes(msgspec.Struct, frozen=True):
    """The measured durations of changes. start_s: until a new engine serves; drain_s: until one that leaves is idle"""

    start_s: float
    drain_s: float


def change_to(target: FleetCounts, engines: Iterable[PlannedEngine]) -> FleetChange:
    """Return the change that makes these engines the target.

    Of the engines of a role that is too large, those that do not serve yet leave first, then those whose change costs
    least: few streams, few cached tokens. Engines that serve change their roles; the rest leaves.
    """
    there = [engine for engine in engines if engine.role in PLANNED_ROLES and not engine.is_leaving]
    spare: list[PlannedEngine] = []
    missing: list[EngineRole] = []
    for role in PLANNED_ROLES:
        of_role = sorted((one for one in there if one.role is role), key=_price_order)
        spare += of_role[: max(len(of_role) - target.of_role(role), 0)]
        missing += [role] * max(target.of_role(role) - len(of_role), 0)
    movable = sorted((one for one in spare if one.is_serving), key=_price_order)
    flips = [RoleFlip(engine.engine_id, role) for engine, role in zip(movable, missing, strict=False)]
    flipped = {flip.engine_id for flip in flips}
    starts = FleetCounts.of(missing[len(flips) :])
    return FleetChange(tuple(flips), tuple(one.engine_id for one in spare if one.engine_id not in flipped), starts)


def next_steps(target: FleetCounts, engines: Sequence[PlannedEngine], limits: FleetLimits) -> FleetChange:
    """Return what may be done now on the way to the target.

    An engine starts only as far as there is room beside all others; those that leave take their room until they are
    gone. An engine changes its role, or leaves, only if the others can serve: until then it waits for new ones.
    """
    change, by_id = change_to(target, engines), {engine.engine_id: engine for engine in engines}
    serving = FleetCounts.of(one.role for one in engines if one.is_serving and not one.is_leaving)
    there = FleetCounts.of(engine.role for engine in engines)
    flips, removals = [], []
    for flip in change.flips:
        moved = one_of(flip.role) - one_of(by_id[flip.engine_id].role)
        if (serving + moved).can_serve or not serving.can_serve:
            serving, there = serving + moved, there + moved
            flips.append(flip)
    for engine_id in change.removals:
        gone = one_of(by_id[engine_id].role)
        if not by_id[engine_id].is_serving:
            there -= gone  # it has nothing to finish, so its room is free at once
            removals.append(engine_id)
        elif (serving - gone).can_serve or not serving.can_serve:
            serving -= gone
            removals.append(engine_id)
    starts = FleetCounts()
    for role in PLANNED_ROLES:
        for _ in range(change.starts.of_role(role)):
            if limits.has_room_for(there + starts + one_of(role)):
                starts += one_of(role)
    return FleetChange(tuple(flips), tuple(removals), starts)


def switch_cost(
    change: FleetChange, engines: Iterable[PlannedEngine], times: SwitchTimes, prompt_token_s: float
) -> float:
    """Return what a change costs, in engine-seconds.

    A start costs the time in which the engine does not serve yet. An engine that leaves, or changes its role, is busy
    only with its own streams for the time of a drain, and the tokens that it has cached are computed anew elsewhere.
    prompt_token_s: the seconds that the computation of one token of a prompt takes
    """
    by_id = {engine.engine_id: engine for engine in engines}
    cost_s = times.start_s * change.starts.num_engines
    for engine_id in (*(flip.engine_id for flip in change.flips), *change.removals):
        engine = by_id[engine_id]
        drain_s = times.drain_s if engine.num_streams else 0.0
        cost_s += drain_s + engine.num_cached_tokens * prompt_token_s
    return cost_s


def _price_order(engine: PlannedEngine) -> tuple[bool, int, int, str]:
    return engine.is_serving, engine.num_streams, engine.num_cached_tokens, engine.engine_id
