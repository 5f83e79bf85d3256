"""The placements of a request that are compared: their costs, the choice among them, and the record of the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Final, Generic

import msgspec

from actors.core.requests.request import EngineCoreRequest
from cluster.routing.base import EngineT
from cluster.routing.costs.decode_neighbours import num_meeting_aims
from cluster.routing.costs.request_facts import MIN_SCALE_S, RequestFacts
from cluster.routing.costs.route_cost import (
    DecodeCost,
    PromptCost,
    decode_cost,
    delay_of_others_s,
    fetch_s,
    prompt_cost,
    terms,
)
from cluster.routing.decision import Decision, Reason, RoleChoice, RouteTerms, RoutingMode, Way
from cluster.routing.engine_connection import EngineRole
from cluster.routing.fleet import EngineGroup, Fleet, Use
from cluster.routing.prefix_aware import can_serve_prefix
from cluster.routing.prefixes.cached_prefix import CachedPrefix
from cluster.routing.reported_work import EngineWork
from kv_transfer.params import PrefixSource

_NUM_HOLDERS: Final = 2
"""The engines with the longest cached prefix that are compared, for each group of engines."""
_SOON_S: Final = 0.3
"""An engine that has computed its prompts within this time may have others: it is looked at ten times a second."""
_MIN_ERROR, _MAX_ERROR = 0.02, 0.1
"""The bounds of the part of the cost that counts as the error of the prediction."""


class Placement(msgspec.Struct, Generic[EngineT], frozen=True):
    """The engines that might serve a request, and what that costs. prefill: None if `decode` does all of it"""

    total_s: float
    prefill: EngineT | None
    decode: EngineT
    prompt: PromptCost
    decoding: DecodeCost
    adapter_s: float

    @property
    def way(self) -> Way:
        """The way of the request, by the roles of the engines."""
        if self.prefill is not None:
            return Way.PREFILL_DECODE
        return Way.DECODE_ALONE if self.decode.descriptor.role is EngineRole.DECODE else Way.PREFILL_ALONE

    @property
    def computing(self) -> EngineT:
        """The engine that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def load_s(self) -> float:
        """The part of the cost that is other requests' work."""
        return self.prompt.wait_s + delay_of_others_s(self.prompt, self.decoding)


class Compared(Generic[EngineT]):
    """The engines of one group that are compared for one request, and their costs, each computed once."""

    def __init__(
        self,
        fleet: Fleet[EngineT],
        group: EngineGroup[EngineT],
        facts: RequestFacts,
        cached: CachedPrefix,
        *,
        ignores_roles: bool = False,
    ) -> None:
        self.group = group
        self._fleet = fleet
        self._facts = facts
        self._cached = cached
        self._ignores_roles = ignores_roles
        self._source = _fetch_source(fleet, group, cached)
        self._prompts: dict[int, PromptCost] = {}
        self._decodings: dict[tuple[int, float], DecodeCost] = {}
        self._soonest_s: float | None = None
        self.coming_s = 0.0
        """The time until those have begun to decode here whose prompts are being computed elsewhere."""

    def choose(self, draw: int) -> None:
        """Choose the engines to compare, for each use."""
        group, now_s = self.group, self._facts.now_s
        self.prefill, self.decode, self.alone = group.candidates(now_s, draw)
        if self._cached:
            found = (self._fleet.positions.get(key) for key, _ in self._cached.longest_first(is_newest_first=True))
            of_group = (position[1] for position in found if position is not None and position[0] is group)
            holders = list(islice(of_group, _NUM_HOLDERS))
            for use, chosen in zip(Use, (self.prefill, self.decode, self.alone), strict=True):
                chosen.extend(index for index in holders if index not in chosen and group.is_for[use][index])
        self.alone.extend(index for index in (*self.prefill, *self.decode) if index not in self.alone)

    def prompt(self, index: int) -> PromptCost:
        """Return the cost of computing the prompt at an engine."""
        if (known := self._prompts.get(index)) is not None:
            return known
        work, source, fetch = self.group.works[index], self._source, None
        assert work.prediction is not None, "the fleet is sure"
        num_cached = self._cached.length_of(work.key)
        if source is not None and source[2] > num_cached:
            _, there, num_there = source
            fetch = num_there, fetch_s(work, there, num_there - num_cached)
        cost = self._prompts[index] = prompt_cost(
            self._facts,
            work,
            work.prediction,
            num_cached,
            fetch,
            coming_s=self._coming_s(index, work),
            prefers_prompts=self.group.prefer_prompts[index] and not self._ignores_roles,
            ignores_roles=self._ignores_roles,
        )
        return cost

    def decoding(self, index: int, begins_in_s: float) -> DecodeCost:
        """Return the cost of decoding at an engine. begins_in_s: the time until the prompt is computed"""
        work = self.group.works[index]
        if not (coming_s := self._coming_s(index, work)):
            begins_in_s = 0.0
        if (known := self._decodings.get((index, begins_in_s))) is not None:
            return known
        assert work.prediction is not None, "the fleet is sure"
        num_cached = self._cached.length_of(work.key)
        cost = self._decodings[index, begins_in_s] = decode_cost(
            self._facts,
            work,
            work.prediction,
            num_cached,
            begins_in_s=begins_in_s,
            coming_s=coming_s,
            prefers_prompts=self.group.prefer_prompts[index] and not self._ignores_roles,
            ignores_roles=self._ignores_roles,
        )
        return cost

    def _coming_s(self, index: int, work: EngineWork) -> float:
        # Engines that do both would swing if reports are late: each looks empty to those who come behind a queue.
        if not work.num_decodes or self._ignores_roles or self.group.are_both[index]:
            return 0.0
        return max(self.coming_s, work.wait_s(self._facts.now_s))

    def soonest_s(self) -> float:
        """Return the time until the prompt is computed at the engine of those for pairs that has it first."""
        if self._soonest_s is None:
            self._soonest_s = min([self.prompt(index).ends_in_s for index in self.prefill], default=0.0)
        return self._soonest_s


def _fetch_source(
    fleet: Fleet[EngineT], group: EngineGroup[EngineT], cached: CachedPrefix
) -> tuple[EngineT, EngineWork, int] | None:
    """Return the engine from which this group's engines can fetch most of the prefix, and the tokens that it has."""
    for key, num_tokens in cached.longest_first():
        if (position := fleet.positions.get(key)) is not None:
            there, index = position
            if can_serve_prefix(there.engines[index].descriptor, group.engines[0].descriptor):
                return there.engines[index], there.works[index], num_tokens
    return None


def prefix_source(fleet: Fleet[EngineT], chosen: Placement[EngineT], cached: CachedPrefix) -> PrefixSource | None:
    """Return the engine that has more of the prefix than the one that computes the prompt."""
    if not cached:
        return None
    computing = chosen.computing.descriptor.key
    source = _fetch_source(fleet, fleet.positions[computing][0], cached)
    if source is None or source[2] <= cached.length_of(computing):
        return None
    return PrefixSource(source[0].descriptor.kv_address, source[2])


def is_overload(compared: Iterable[Compared[EngineT]], facts: RequestFacts) -> bool:
    """Return whether more prompts wait that will be late than requests meet both aims, at the engines compared.

    Prompts that wait are taken to be like this one. Without an aim for the time between tokens nobody is protected from
    prompts, and no engine kept free of them.
    """
    if facts.ttft_s is None or facts.itl_s is None:
        return False
    aim_s = facts.ttft_s - facts.waited_s
    prompts = [one.prompt(index) for one in compared for index in one.alone]
    num_late = sum(
        min(one.ends_in_s - aim_s, one.wait_s) / max(one.seconds, MIN_SCALE_S)
        for one in prompts
        if one.ends_in_s > aim_s
    )
    for one in prompts:
        if num_late > 0 and one.work.prediction is not None:
            num_late -= num_meeting_aims(facts, one.work, one.work.prediction)
    return num_late > 0


def with_roles_kept(placements: list[Placement[EngineT]], facts: RequestFacts) -> list[Placement[EngineT]]:
    """Return the placements that keep to the roles; all, if with none of these the first token would come in time."""
    pairs = [one for one in placements if one.prefill is not None]
    if not pairs or facts.ttft_s is None:
        return pairs or placements
    soonest_s = min(one.prompt.wait_s + one.prompt.seconds for one in pairs)
    return pairs if soonest_s < facts.ttft_s - facts.waited_s else placements


def draw_placement(placements: list[Placement[EngineT]], draw: int) -> tuple[Placement[EngineT], Reason]:
    """Choose the cheapest placement; of those that cost the same, the one with less load of two that are drawn.

    Where others cost the same, no engine of role `prefill` decodes: prompts that come soon would take longer there.
    """
    if len(placements) == 1:
        return placements[0], Reason.ONLY_WAY
    best = min(placements, key=_total_s)
    limit_s = best.total_s + _error_s(best)
    equal = [placement for placement in placements if placement.total_s <= limit_s]
    if len(equal) == 1:
        return best, Reason.COST
    equal = [one for one in equal if one.decode.descriptor.role is not EngineRole.PREFILL] or equal
    if len(equal) == 1:
        return equal[0], Reason.TIE_DRAWN
    one, other = draw % len(equal), (draw >> 32) % (len(equal) - 1)
    first, second = equal[one], equal[other + (other >= one)]
    return (second if second.load_s < first.load_s else first), Reason.TIE_DRAWN


def better_elsewhere(
    current: Placement[EngineT], placements: Iterable[Placement[EngineT]]
) -> Placement[EngineT] | None:
    """Return the cheapest placement for a prompt that waits elsewhere; None if it should stay where it is.

    Only engines that will soon have no more prompts are looked at: there the prompt does not wait again, and an engine
    that waits for work is what no prediction could foresee.
    """
    here = current.computing.descriptor.key
    soon = [one for one in placements if one.prompt.wait_s <= _SOON_S and one.computing.descriptor.key != here]
    best = min(soon, key=_total_s, default=None)
    if best is None or best.total_s + _error_s(best) >= current.total_s:
        return None
    return best


def _error_s(placement: Placement[EngineT]) -> float:
    """Return the part of a cost that counts as the error of the prediction."""
    # The decode steps are left out: equal engines have equal predictions for them.
    error = min(max(placement.prompt.sigma, _MIN_ERROR), _MAX_ERROR)
    return error * max(placement.prompt.wait_s + placement.prompt.seconds, 0.0)


def _total_s(placement: Placement[EngineT]) -> float:
    return placement.total_s


def describe(
    request: EngineCoreRequest,
    reason: Reason,
    facts: RequestFacts,
    chosen: Placement[EngineT],
    placements: list[Placement[EngineT]],
    *,
    mode: RoutingMode = RoutingMode.COST,
    roles: RoleChoice | None = None,
) -> Decision:
    """Describe the choice. placements: those that were compared, with the chosen one among them"""
    best: dict[Way, Placement[EngineT]] = {}
    runner_up: Placement[EngineT] | None = None
    without_roles_s = math.inf
    for one in placements:
        way = one.way
        if way not in best or one.total_s < best[way].total_s:
            best[way] = one
        if one is not chosen and (runner_up is None or one.total_s < runner_up.total_s):
            runner_up = one
        if one.prefill is None:
            without_roles_s = min(without_roles_s, one.total_s)
    others = sorted((one for way, one in best.items() if way is not chosen.way), key=_total_s)
    found = {id(one): _terms(facts, one) for one in others}
    return Decision(
        request.request_id,
        mode,
        reason,
        _terms(facts, chosen),
        tuple(found.values()),
        None if runner_up is None else found.get(id(runner_up)) or _terms(facts, runner_up),
        without_roles_s if math.isfinite(without_roles_s) else 0.0,
        roles,
    )


def _terms(facts: RequestFacts, placement: Placement[EngineT]) -> RouteTerms:
    return terms(placement.way, facts, placement.prompt, placement.decoding, placement.adapter_s)
