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

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

import msgspec
import xxhash

from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineLoad, EngineT, Route
from cluster.routing.costs.request_facts import RequestFacts
from cluster.routing.costs.route_cost import (
    PromptCost,
    alone_total,
    handoff_bytes,
    pair_total,
    prompt_cost,
)
from cluster.routing.decision import Decision, LateDecision, Reason, RoleChoice, RoleUse, RoutingMode
from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from cluster.routing.fleet import Fleet
from cluster.routing.load_book import LoadBook
from cluster.routing.placements import (
    Compared,
    Placement,
    better_elsewhere,
    describe,
    draw_placement,
    is_overload,
    prefix_source,
    with_roles_kept,
)
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.cached_prefix import CachedPrefix
from cluster.routing.reported_work import EngineWork

_RATE: Final = 0.02
"""How much one request counts in the moving averages of the lengths of prompts and outputs."""
_MAX_REMEMBERED: Final = 1 << 20


class _Choice(msgspec.Struct, frozen=True):
    """The newest choice, which on_start() takes up. cached: what the engines had of the prompt"""

    request_id: str
    facts: RequestFacts
    decode: EngineLoad
    prompt: PromptCost
    cached: CachedPrefix


class _Started(msgspec.Struct, frozen=True):
    """A request under way.

    engines: those that have it: one, or one that computes its prompt and one that decodes
    lengths: the tokens of its prompt that each of them had cached; None if costs did not decide
    """

    engines: tuple[EngineKey, ...]
    lengths: dict[EngineKey, int] | None


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
        self._newest: _Choice | None = None
        self._started: OrderedDict[str, _Started] = OrderedDict()
        """The requests under way, by their ids."""
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
        self._pairs.count_lookup(cached)
        facts, draw = self._facts(request), _draw(request)
        facts, roles, compared = _compare_engines(fleet, facts, cached, draw)
        placements = list(self._placements(request, facts, compared))
        allowed = with_roles_kept(placements, facts) if roles.use is RoleUse.KEPT else placements
        chosen, reason = draw_placement(allowed, draw)
        reasons = LateDecision(lambda: describe(request, reason, facts, chosen, placements, roles=roles))
        self._newest = _Choice(request.request_id, facts, chosen.decode, chosen.prompt, cached)
        return Route(chosen.prefill, chosen.decode, prefix_source(fleet, chosen, cached), reasons)

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Choose an engine that runs out of prompts, if that costs less than to wait on; see Router."""
        started, known = self._started.get(waiting_id), self._pairs.find_under_way(waiting_id)
        if started is None or started.lengths is None or known is None:
            return None
        fleet = self._fleet_of(engines)
        if not fleet.is_sure or any(key not in fleet.positions for key in started.engines):
            return None
        # Of its own engines the index knows what this request will bring there if it stays.
        cached, facts = known.but_for(started.lengths), self._facts(again)
        here = [fleet.engine_of(key) for key in started.engines]
        with self._book.without(started.engines, waiting_id):
            facts, roles, compared = _compare_engines(fleet, facts, cached, _draw(again))
            current = self._placement_of(again, fleet, facts, compared, Route(here[0] if here[1:] else None, here[-1]))
            others = list(self._placements(again, facts, compared))
            placements = [current, *(with_roles_kept(others, facts) if roles.use is RoleUse.KEPT else others)]
        best = better_elsewhere(current, placements)
        if best is None:
            return None
        reasons = LateDecision(lambda: describe(again, Reason.REROUTED, facts, best, placements, roles=roles))
        self._leave(waiting_id, is_waiting=True)
        self._newest = _Choice(again.request_id, facts, best.decode, best.prompt, cached)
        return Route(best.prefill, best.decode, prefix_source(fleet, best, cached), reasons)

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Add the request to the load of its engines, and note that they will soon have its KV and its adapter."""
        # Here the description delays nothing, and the load is still what it was at the choice.
        decision = None if route.reasons is None else route.reasons.describe()
        late_part = 0.0 if decision is None or decision.chosen is None else decision.chosen.ttft_miss_probability
        self._pairs.on_start(request, route)
        newest, self._newest = self._newest, None
        engines = _engines(route)
        works = [self._book.work_of(engine.descriptor) for engine in engines]
        prompt: PromptCost | None = None
        lengths: dict[EngineKey, int] | None = None
        if newest is not None and newest.request_id == request.request_id and newest.decode is route.decode:
            facts, prompt = newest.facts, newest.prompt
            lengths = {work.key: newest.cached.length_of(work.key) for work in works}
        else:
            facts = self._facts(request)
            if (prediction := works[0].prediction) is not None:
                prompt = prompt_cost(facts, works[0], prediction, 0)
        for engine, sent in zip(engines, _sent_work(facts, prompt, works, request, late_part), strict=True):
            self._book.note_sent(engine.descriptor, request.request_id, sent)
        self._started[request.request_id] = _Started(tuple(work.key for work in works), lengths)
        if len(self._started) > _MAX_REMEMBERED:
            self._started.popitem(last=False)

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
        self._leave(request_id, is_waiting=False)

    def _leave(self, request_id: str, *, is_waiting: bool) -> None:
        self._pairs.on_leave(request_id)
        if (started := self._started.pop(request_id, None)) is not None:
            for key in started.engines:
                self._book.note_left(key, request_id, is_waiting=is_waiting)

    def update(self, work: EngineWork) -> None:
        """Take in that an engine's work has changed."""
        self._fleet.update(work)

    def _by_rule(self, request: EngineCoreRequest, engines: Sequence[EngineT], reason: Reason) -> Route[EngineT]:
        route = self._pairs.choose(request, engines)
        return replace(route, reasons=LateDecision(lambda: self._describe_by_rule(request, engines, reason, route)))

    def _describe_by_rule(
        self, request: EngineCoreRequest, engines: Sequence[EngineT], reason: Reason, route: Route[EngineT]
    ) -> Decision:
        """Describe what a rule has chosen, with the costs as far as they are known."""
        plain = Decision(request.request_id, self._mode, reason)
        if reason is Reason.OWN_RULE:
            return plain  # Costs are those of requests that decode.
        fleet = self._fleet_of(engines)
        if any(self._book.work_of(engine.descriptor).prediction is None for engine in _engines(route)):
            return plain
        cached, facts = self._pairs.find_cached(request), self._facts(request)
        compared = [Compared(fleet, group, facts, cached) for group in fleet.groups]
        if fleet.is_sure:
            compared = _compare(fleet, facts, cached, _draw(request))
        chosen = self._placement_of(request, fleet, facts, compared, route)
        placements = [chosen]
        if fleet.is_sure:
            others = self._placements(request, facts, compared)
            placements += [one for one in others if (one.prefill, one.decode) != (chosen.prefill, chosen.decode)]
        described = describe(request, reason, facts, chosen, placements, mode=self._mode)
        # Without the costs of all engines it is not known which one would be the best.
        return described if fleet.is_sure else msgspec.structs.replace(described, without_roles_s=0.0)

    def _placement_of(
        self,
        request: EngineCoreRequest,
        fleet: Fleet[EngineT],
        facts: RequestFacts,
        compared: Sequence[Compared[EngineT]],
        route: Route[EngineT],
    ) -> Placement[EngineT]:
        """Return a route with its cost."""
        by_group = {id(one.group): one for one in compared}
        computing, number = fleet.positions[(route.prefill or route.decode).descriptor.key]
        prompt = by_group[id(computing)].prompt(number)
        group, index = fleet.positions[route.decode.descriptor.key]
        decoding = by_group[id(group)].decoding(index, prompt.ends_in_s)
        adapter_s = self._adapter_s(request, prompt, *_engines(route))
        total = alone_total if route.prefill is None else pair_total
        total_s = total(facts, prompt, decoding, adapter_s)
        return Placement(total_s, route.prefill, route.decode, prompt, decoding, adapter_s)

    def _facts(self, request: EngineCoreRequest) -> RequestFacts:
        slo, (ttft_s, itl_s) = request.slo, self._aims
        if slo is not None:
            ttft_s, itl_s = slo.ttft_s or ttft_s, slo.itl_s or itl_s
        now_s = self._book.clock()
        # A request that is submitted again has waited meanwhile.
        waited_s = max(now_s - request.arrival_time_s, 0.0) if request.attempt else 0.0
        return RequestFacts(
            len(request.prompt_token_ids) + len(request.output_token_ids),
            max(
                min(self._usual.num_output_tokens, request.sampling_params.max_tokens - len(request.output_token_ids)),
                1,
            ),
            ttft_s,
            itl_s,
            now_s,
            waited_s,
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
        self, request: EngineCoreRequest, facts: RequestFacts, compared: Sequence[Compared[EngineT]]
    ) -> Iterator[Placement[EngineT]]:
        """Yield the placements that are worth comparing, with their costs."""
        by_group = {id(one.group): one for one in compared}
        has_adapter, adapter_s = request.lora is not None, 0.0
        for one in compared:
            for index in one.alone:
                prompt, engine = one.prompt(index), one.group.engines[index]
                decoding = one.decoding(index, prompt.ends_in_s)
                if has_adapter:
                    adapter_s = self._adapter_s(request, prompt, engine)
                total_s = alone_total(facts, prompt, decoding, adapter_s)
                yield Placement(total_s, None, engine, prompt, decoding, adapter_s)
        for one in compared:
            soonest_s = one.soonest_s()
            for other in [by_group[id(group)] for group in one.group.consumers if one.prefill]:
                there = other.group
                consumers = [
                    (there.ranks[index], there.engines[index], other.decoding(index, soonest_s))
                    for index in other.decode
                ]
                for index in one.prefill:
                    rank, prompt, engine = one.group.ranks[index], one.prompt(index), one.group.engines[index]
                    for higher, consumer, decoding in consumers:
                        if higher <= rank:
                            continue
                        if has_adapter:
                            adapter_s = self._adapter_s(request, prompt, engine, consumer)
                        total_s = pair_total(facts, prompt, decoding, adapter_s)
                        yield Placement(total_s, engine, consumer, prompt, decoding, adapter_s)

    def _adapter_s(self, request: EngineCoreRequest, prompt: PromptCost, *engines: EngineLoad) -> float:
        """Return what the adapters cost that these engines have to load."""
        if request.lora is None:
            return 0.0
        return prompt.seconds * sum(not self._pairs.has_adapter(engine.descriptor.key, request) for engine in engines)


def _compare_engines(
    fleet: Fleet[EngineT], facts: RequestFacts, cached: CachedPrefix, draw: int
) -> tuple[RequestFacts, RoleChoice, list[Compared[EngineT]]]:
    """Return how much aims and roles count, and the engines that are worth comparing."""
    roles = fleet.role_choice(facts.itl_s, facts.ttft_s, facts.now_s)
    compared = _compare(fleet, facts, cached, draw, roles.use)
    if not is_overload(compared, facts):
        return facts, roles, compared
    facts = msgspec.structs.replace(facts, only_own_time=True)
    roles = msgspec.structs.replace(roles, use=RoleUse.OVERLOADED)
    return facts, roles, _compare(fleet, facts, cached, draw, roles.use)


def _compare(
    fleet: Fleet[EngineT],
    facts: RequestFacts,
    cached: CachedPrefix,
    draw: int,
    role_use: RoleUse = RoleUse.WEIGHED,
) -> list[Compared[EngineT]]:
    """Choose the engines of each group that are worth comparing."""
    ignores_roles = role_use in (RoleUse.IGNORED, RoleUse.OVERLOADED)
    compared = [Compared(fleet, group, facts, cached, ignores_roles=ignores_roles) for group in fleet.groups]
    by_group = {id(one.group): one for one in compared}
    for one in compared:
        one.choose(draw)
    for one in compared:
        soonest_s = one.soonest_s()
        for group in one.group.consumers:
            other = by_group[id(group)]
            other.coming_s = max(other.coming_s, soonest_s)
    return compared


def _draw(request: EngineCoreRequest) -> int:
    return xxhash.xxh3_64_intdigest(request.request_id.encode())


def _engines(route: Route[EngineT]) -> list[EngineT]:
    return [engine for engine in (route.prefill, route.decode) if engine is not None]


def _sent_work(
    facts: RequestFacts,
    prompt: PromptCost | None,
    works: Sequence[EngineWork],
    request: EngineCoreRequest,
    late_part: float,
) -> list[SentWork]:
    """Return the work that a request brings to each engine of its route: one that does all, or two."""
    computed = facts.num_tokens - (0 if prompt is None else prompt.num_cached_tokens)
    seconds = 0.0 if prompt is None else prompt.seconds
    if request.pooling_params is not None:
        return [SentWork(computed, seconds)]
    decoding = SentWork(
        num_context_tokens=facts.num_tokens, num_output_tokens=facts.num_output_tokens, late_part=late_part
    )
    if len(works) == 1:
        return [replace(decoding, num_computed_tokens=computed, prefill_s=seconds)]
    num_bytes = handoff_bytes(facts, works[0], 0)
    return [SentWork(computed, seconds, consumer=works[1].key[0], num_handoff_bytes=num_bytes), decoding]
