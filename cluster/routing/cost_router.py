"""Routes each request by what its placements cost: one engine for all of it, or one that prefills and one that decodes.

Three kinds of placements are compared, each over the engines that can do it: an engine of any role that does all of the
request, and pairs of an engine that computes prompts and one that decodes, from a lower to a higher handoff rank. Only
a few engines of each kind are looked at: those that have the prompt's prefix, the cheapest one for a usual request, and
others that are drawn. Placements whose costs differ by less than the error of the prediction count as equal: two of
them are drawn by the request's id, and the one with less load is taken.

Requests with rules of their own: prompts whose vectors are wanted go where they went before there were costs (the
fewest unfinished requests). Samples that follow one prompt go to the engine that has the prompt's KV, and never come
here. A request with images costs what its tokens cost; the encode engine is chosen afterwards, by the image's hash. An
adapter that an engine has probably not loaded costs that engine as much as computing the whole prompt.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Generic, cast

import msgspec
import xxhash

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineLoad, EngineT, Route
from cluster.routing.decision import Decision, LateDecision, Reason, RouteTerms, RoutingMode, Way
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole
from cluster.routing.fleet import EngineGroup, Fleet, Use
from cluster.routing.load_book import EngineWork, LoadBook, SentWork
from cluster.routing.prefix_aware import PrefixAwarePair, can_serve_prefix
from cluster.routing.route_cost import (
    DecodeCost,
    PromptCost,
    RequestFacts,
    alone_total,
    decode_cost,
    fetch_s,
    handoff_bytes,
    pair_total,
    prompt_cost,
    terms,
)
from kv_transfer.params import PrefixSource

_NUM_HOLDERS: Final = 2
"""The engines with the longest cached prefix that are compared, for each group of engines."""
_MIN_ERROR, _MAX_ERROR = 0.02, 0.1
"""The bounds of the part of the cost that counts as the error of the prediction."""
_RATE: Final = 0.02
"""How much one request counts in the moving averages of the lengths of prompts and outputs."""
_MAX_REMEMBERED: Final = 1 << 20


class _Placement(msgspec.Struct, Generic[EngineT], frozen=True):
    total_s: float
    prefill: EngineT | None
    decode: EngineT
    prompt: PromptCost
    decoding: DecodeCost
    adapter_s: float

    @property
    def way(self) -> Way:
        if self.prefill is not None:
            return Way.PREFILL_DECODE
        return Way.DECODE_ALONE if self.decode.descriptor.role is EngineRole.DECODE else Way.PREFILL_ALONE

    @property
    def load_s(self) -> float:
        return self.prompt.wait_s + self.prompt.inflicted_s + self.decoding.inflicted_s


class CostRouter:
    """A Router. Belongs to the event loop of its load book."""

    def __init__(
        self,
        pairs: PrefixAwarePair,
        book: LoadBook,
        mode: RoutingMode = RoutingMode.COST,
        *,
        ttft_s: float | None = None,
        itl_s: float | None = None,
    ) -> None:
        """Know no engine yet.

        pairs:         knows the prefixes, and routes as long as costs are not known, or if the mode says so
        book:          the engines' work
        ttft_s, itl_s: the aims of requests that have none of their own; None: no aim
        """
        self._pairs = pairs
        self._book = book
        self._mode = mode
        self._aims = ttft_s, itl_s
        self._usual = RequestFacts(512, 128)
        self._engines: Sequence[EngineLoad] = ()
        self._known: list[tuple[int, EngineDescriptor]] = []
        self._fleet: Fleet[EngineLoad] = Fleet((), book, self._usual)
        self._newest: tuple[str, RequestFacts, EngineLoad, PromptCost] | None = None
        self._sent_to: OrderedDict[str, tuple[EngineKey, ...]] = OrderedDict()
        """The engines of each request under way, by its id."""
        book.watch(self)

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose the engines of a request. Raises NoEngineAvailable."""
        self._newest = None
        if request.pooling_params is not None:
            return self._by_rule(request, engines, Reason.OWN_RULE)
        if self._mode is not RoutingMode.COST:
            return self._by_rule(request, engines, Reason.MODE)
        fleet = self._fleet_of(engines)
        if not fleet.groups:
            raise NoEngineAvailable
        if not fleet.is_sure:
            return self._by_rule(request, engines, Reason.MODEL_NOT_SURE)
        cached = self._pairs.find_cached(request)
        facts = self._facts(request)
        draw = xxhash.xxh3_64_intdigest(request.request_id.encode())
        placements = list(self._placements(request, fleet, facts, cached, draw))
        chosen, reason = _draw(placements, draw)
        self._newest = request.request_id, facts, chosen.decode, chosen.prompt
        reasons = LateDecision(lambda: _decision(request, reason, facts, chosen, placements))
        return Route(chosen.prefill, chosen.decode, _prefix_source(fleet, chosen, cached), reasons)

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Add the request to the load of its engines, and note that they will soon have its KV and its adapter."""
        if route.reasons is not None:
            # Here it delays nothing, and the load is still what it was at the choice.
            route.reasons.describe()
        self._pairs.on_start(request, route)
        newest, self._newest = self._newest, None
        engines = [engine for engine in (route.prefill, route.decode) if engine is not None]
        works = [self._book.work_of(engine.descriptor) for engine in engines]
        prompt: PromptCost | None = None
        if newest is not None and newest[0] == request.request_id and newest[2] is route.decode:
            facts, prompt = newest[1], newest[3]
        else:
            facts = self._facts(request)
            if (prediction := works[0].prediction) is not None:
                prompt = prompt_cost(facts, works[0], prediction, 0)
        for engine, sent in zip(engines, _sent_work(facts, prompt, works, request), strict=True):
            self._book.note_sent(engine.descriptor, request.request_id, sent)
        self._sent_to[request.request_id] = tuple(work.key for work in works)
        if len(self._sent_to) > _MAX_REMEMBERED:
            self._sent_to.popitem(last=False)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Note what the decode engine has cached now, and how long the output was."""
        self._pairs.on_end(request, output_token_ids, route)
        num_new, usual = len(output_token_ids) - len(request.output_token_ids), self._usual
        self._usual = RequestFacts(
            max(round(usual.num_tokens + _RATE * (len(request.prompt_token_ids) - usual.num_tokens)), 1),
            usual.num_output_tokens + _RATE * (num_new - usual.num_output_tokens),
        )
        self._fleet.usual = self._usual

    def on_leave(self, request_id: str) -> None:
        """Deduct the request from the load of its engines."""
        for key in self._sent_to.pop(request_id, ()):
            self._book.note_left(key, request_id)

    def update(self, work: EngineWork) -> None:
        """Take in that an engine's work has changed."""
        self._fleet.update(work)

    def _by_rule(self, request: EngineCoreRequest, engines: Sequence[EngineT], reason: Reason) -> Route[EngineT]:
        route = self._pairs.choose(request, engines)
        return replace(route, reasons=LateDecision(lambda: Decision(request.request_id, self._mode, reason)))

    def _facts(self, request: EngineCoreRequest) -> RequestFacts:
        slo, (ttft_s, itl_s) = request.slo, self._aims
        if slo is not None:
            ttft_s, itl_s = slo.ttft_s or ttft_s, slo.itl_s or itl_s
        return RequestFacts(
            len(request.prompt_token_ids) + len(request.output_token_ids),
            max(
                min(self._usual.num_output_tokens, request.sampling_params.max_tokens - len(request.output_token_ids)),
                1,
            ),
            ttft_s,
            itl_s,
            self._book.clock(),
        )

    def _fleet_of(self, engines: Sequence[EngineT]) -> Fleet[EngineT]:
        """Return the arrays of these engines, which are made again when the engines are not those of the last call."""
        if engines is not self._engines:
            known = [(id(engine), engine.descriptor) for engine in engines]
            if known != self._known:
                self._known, self._fleet = known, Fleet(engines, self._book, self._usual)
            self._engines = engines
        return cast(Fleet[EngineT], self._fleet)

    def _placements(
        self,
        request: EngineCoreRequest,
        fleet: Fleet[EngineT],
        facts: RequestFacts,
        cached: Mapping[EngineKey, int],
        draw: int,
    ) -> Iterator[_Placement[EngineT]]:
        """Yield the placements that are worth comparing, with their costs."""
        compared = [_Compared(fleet, group, facts, cached) for group in fleet.groups]
        for one in compared:
            one.choose(draw)
            for index in one.alone:
                prompt, decoding, engine = one.prompt(index), one.decoding(index), one.group.engines[index]
                adapter_s = self._adapter_s(request, prompt, engine)
                total_s = alone_total(facts, prompt, decoding, adapter_s)
                yield _Placement(total_s, None, engine, prompt, decoding, adapter_s)
        by_group = {id(one.group): one for one in compared}
        for one in compared:
            for other in [by_group[id(group)] for group in one.group.consumers]:
                for index in one.prefill:
                    rank, prompt, engine = one.group.ranks[index], one.prompt(index), one.group.engines[index]
                    for number in other.decode:
                        if other.group.ranks[number] <= rank:
                            continue
                        decoding, consumer = other.decoding(number), other.group.engines[number]
                        adapter_s = self._adapter_s(request, prompt, engine, consumer)
                        total_s = pair_total(facts, prompt, decoding, adapter_s)
                        yield _Placement(total_s, engine, consumer, prompt, decoding, adapter_s)

    def _adapter_s(self, request: EngineCoreRequest, prompt: PromptCost, *engines: EngineLoad) -> float:
        """Return what the adapters cost that these engines have to load."""
        if request.lora is None:
            return 0.0
        return prompt.seconds * sum(not self._pairs.has_adapter(engine.descriptor.key, request) for engine in engines)


class _Compared(Generic[EngineT]):
    """The engines of one group that are compared for one request, and their costs, each computed once."""

    def __init__(
        self, fleet: Fleet[EngineT], group: EngineGroup[EngineT], facts: RequestFacts, cached: Mapping[EngineKey, int]
    ) -> None:
        self.group = group
        self._fleet = fleet
        self._facts = facts
        self._cached = cached
        self._source = _fetch_source(fleet, group, cached)
        self._prompts: dict[int, PromptCost] = {}
        self._decodings: dict[int, DecodeCost] = {}

    def choose(self, draw: int) -> None:
        """Choose the engines to compare, for each use."""
        group, now_s = self.group, self._facts.now_s
        self.prefill, self.decode, self.alone = group.candidates(now_s, draw)
        if self._cached:
            held = [
                (num_tokens, position[1])
                for key, num_tokens in self._cached.items()
                if (position := self._fleet.positions.get(key)) is not None and position[0] is group
            ]
            holders = [index for _, index in heapq.nlargest(_NUM_HOLDERS, held)]
            for use, chosen in zip(Use, (self.prefill, self.decode, self.alone), strict=True):
                chosen.extend(index for index in holders if index not in chosen and group.is_for[use][index])
        self.alone.extend(index for index in (*self.prefill, *self.decode) if index not in self.alone)

    def prompt(self, index: int) -> PromptCost:
        """Return the cost of computing the prompt at an engine."""
        if (known := self._prompts.get(index)) is not None:
            return known
        work, source, fetch = self.group.works[index], self._source, None
        assert work.prediction is not None, "the fleet is sure"
        num_cached = self._cached.get(work.key, 0)
        if source is not None and source[2] > num_cached:
            _, there, num_there = source
            fetch = num_there, fetch_s(work, there, num_there - num_cached)
        cost = self._prompts[index] = prompt_cost(self._facts, work, work.prediction, num_cached, fetch)
        return cost

    def decoding(self, index: int) -> DecodeCost:
        """Return the cost of decoding at an engine."""
        if (known := self._decodings.get(index)) is not None:
            return known
        work = self.group.works[index]
        assert work.prediction is not None, "the fleet is sure"
        num_cached = self._cached.get(work.key, 0)
        cost = self._decodings[index] = decode_cost(self._facts, work, work.prediction, num_cached)
        return cost


def _fetch_source(
    fleet: Fleet[EngineT], group: EngineGroup[EngineT], cached: Mapping[EngineKey, int]
) -> tuple[EngineT, EngineWork, int] | None:
    """Return the engine from which this group's engines can fetch most of the prefix, and the tokens that it has."""
    best: tuple[EngineT, EngineWork, int] | None = None
    for key, num_tokens in cached.items():
        position = fleet.positions.get(key)
        if position is None or (best is not None and num_tokens <= best[2]):
            continue
        there, index = position
        if can_serve_prefix(there.engines[index].descriptor, group.engines[0].descriptor):
            best = there.engines[index], there.works[index], num_tokens
    return best


def _prefix_source(
    fleet: Fleet[EngineT], chosen: _Placement[EngineT], cached: Mapping[EngineKey, int]
) -> PrefixSource | None:
    """Return the engine that has more of the prefix than the one that computes the prompt."""
    if not cached:
        return None
    computing = (chosen.decode if chosen.prefill is None else chosen.prefill).descriptor.key
    source = _fetch_source(fleet, fleet.positions[computing][0], cached)
    if source is None or source[2] <= cached.get(computing, 0):
        return None
    return PrefixSource(source[0].descriptor.kv_address, source[2])


def _draw(placements: list[_Placement[EngineT]], draw: int) -> tuple[_Placement[EngineT], Reason]:
    """Choose the cheapest placement; of those that cost the same, the one with less load of two that are drawn."""
    if len(placements) == 1:
        return placements[0], Reason.ONLY_WAY
    best = min(placements, key=_total_s)
    # The decode steps are left out of the error: equal engines have equal predictions for them.
    error = min(max(best.prompt.sigma, _MIN_ERROR), _MAX_ERROR)
    limit_s = best.total_s + error * max(best.prompt.wait_s + best.prompt.seconds, 0.0)
    equal = [placement for placement in placements if placement.total_s <= limit_s]
    if len(equal) == 1:
        return best, Reason.COST
    one, other = draw % len(equal), (draw >> 32) % (len(equal) - 1)
    first, second = equal[one], equal[other + (other >= one)]
    return (second if second.load_s < first.load_s else first), Reason.TIE_DRAWN


def _total_s(placement: _Placement[EngineT]) -> float:
    return placement.total_s


def _decision(
    request: EngineCoreRequest,
    reason: Reason,
    facts: RequestFacts,
    chosen: _Placement[EngineT],
    placements: list[_Placement[EngineT]],
) -> Decision:
    """Describe the choice."""
    best: dict[Way, _Placement[EngineT]] = {}
    runner_up: _Placement[EngineT] | None = None
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
        RoutingMode.COST,
        reason,
        _terms(facts, chosen),
        tuple(found.values()),
        None if runner_up is None else found.get(id(runner_up)) or _terms(facts, runner_up),
        without_roles_s,
    )


def _terms(facts: RequestFacts, placement: _Placement[EngineT]) -> RouteTerms:
    return terms(placement.way, facts, placement.prompt, placement.decoding, placement.adapter_s)


def _sent_work(
    facts: RequestFacts, prompt: PromptCost | None, works: Sequence[EngineWork], request: EngineCoreRequest
) -> list[SentWork]:
    """Return the work that a request brings to each engine of its route: one that does all, or two."""
    computed = facts.num_tokens - (0 if prompt is None else prompt.num_cached_tokens)
    seconds = 0.0 if prompt is None else prompt.seconds
    if len(works) == 1:
        decodes = 0 if request.pooling_params is not None else facts.num_tokens
        return [SentWork(computed, seconds, decodes)]
    num_bytes = handoff_bytes(facts, works[0], 0)
    return [
        SentWork(computed, seconds, consumer=works[1].key[0], num_handoff_bytes=num_bytes),
        SentWork(num_context_tokens=facts.num_tokens),
    ]
