"""Defines the interface of a router: the engines that a router chooses from, and the route that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import xxhash

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.decision import Decision, LateDecision
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.pairing import find_refusal
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.params import PrefixSource


class EngineLoad(Protocol):
    """An engine that serves, as routing sees it; an EngineConnection is one, and so is a simulated engine."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """Return the description of the engine at the other end."""
        ...

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests the engine has, as far as the caller knows."""
        ...


EngineT = TypeVar("EngineT", bound=EngineLoad)


@dataclass(frozen=True, slots=True)
class Route(Generic[EngineT]):
    """The engines that serve a request.

    prefill:       computes the prompt; None if the decode engine computes it
    prefix_source: an engine that probably has more of the prompt's KV than the engine that computes the prompt
    reasons:       tells why these engines were chosen; None if the router does not say. Equal routes may differ in it
    """

    prefill: EngineT | None
    decode: EngineT
    prefix_source: PrefixSource | None = None
    reasons: LateDecision | None = field(default=None, compare=False, repr=False)

    @property
    def computing(self) -> EngineT:
        """The engine that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def decision(self) -> Decision | None:
        """Why these engines were chosen; None if the router does not say."""
        return None if self.reasons is None else self.reasons.describe()


class Router(Protocol):
    """A routing policy. Its methods do not block; a router may remember what on_start() and on_end() tell it."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a route from the engines that serve. Raises NoEngineAvailable."""
        ...

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Choose other engines for a request whose prompt waits to be computed; None: it stays where it is.

        waiting_id: the id under which it waits; if a route is returned, it counts as having left its engines
        again:      the request as it will be submitted, under another id
        """
        ...

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Note that the request was submitted to this route's engines.

        Work that takes time belongs here and not into choose(): the request is on its way, so the work delays nothing.
        """
        ...

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Note that the request has ended on this route.

        output_token_ids: the whole output, including the tokens that the request came with
        """
        ...

    def on_leave(self, request_id: str) -> None:
        """Note that the engines of a request that on_start() told of have it no more, however it ended.

        request_id: as in on_start(); a further call for the same id changes nothing
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidates(Generic[EngineT]):
    """Engines that can work together: each of these prefill engines may hand over to each of these decode engines.

    prefill: empty if the decode engines compute prompts themselves
    """

    prefill: list[EngineT]
    decode: list[EngineT]


def candidates(engines: Sequence[EngineT]) -> list[Candidates[EngineT]]:
    """Group the engines so that within a group every prefill engine can hand over to every decode engine.

    If any prefill engine can hand over to any decode engine, the groups are of these two roles; a decode engine that no
    prefill engine can hand over to is in a group without prefill engines, and serves alone. Otherwise the only group
    has the engines of role `both`; if there are none, the decode engines; and as a last resort the prefill engines.
    Batches and caches of the last two are not made for serving alone, but a slow answer is better than none.
    Raises NoEngineAvailable if no engine prefills or decodes.
    """
    by_role: dict[EngineRole, list[EngineT]] = {role: [] for role in EngineRole}
    for engine in engines:
        by_role[engine.descriptor.role].append(engine)
    prefill, decode = by_role[EngineRole.PREFILL], by_role[EngineRole.DECODE]
    if prefill and decode:
        groups = _pair_up(prefill, decode)
        if any(group.prefill for group in groups):
            return groups
    alone = by_role[EngineRole.BOTH] or decode or prefill
    if not alone:
        raise NoEngineAvailable
    return [Candidates([], alone)]


def aggregated_candidates(engines: Sequence[EngineT]) -> list[Candidates[EngineT]]:
    """Return one group of all engines that have a language model, whatever their role: each of them serves alone.

    Raises NoEngineAvailable if there is none.
    """
    alone = [engine for engine in engines if engine.descriptor.role is not EngineRole.ENCODE]
    if not alone:
        raise NoEngineAvailable
    return [Candidates([], alone)]


def choose_pair(
    engines: Sequence[EngineT], work: Callable[[EngineT], int], request_id: str, *, is_aggregated: bool = False
) -> tuple[EngineT | None, EngineT]:
    """Choose the prefill and the decode engine that together have the least work, or None and an engine that does both.

    work: returns what an engine has to do; an engine that serves alone counts twice
    is_aggregated: choose one engine that does both, of any role, even if there are pairs
    Of engines with equal work the one with the fewest unfinished requests is chosen. Those that are still equal are
    drawn by the request's id, so that requests spread over idle engines, and the same request goes to the same engine.
    Of equal routes a pair is chosen before an engine alone.
    Raises NoEngineAvailable.
    """

    def drawn(engine: EngineT) -> int:
        return xxhash.xxh3_64_intdigest(f"{request_id} {engine.descriptor.engine_id}".encode())

    def key(engine: EngineT) -> tuple[int, int, int]:
        return work(engine), engine.num_unfinished_requests, drawn(engine)

    best: list[tuple[EngineT | None, EngineT]] = [
        (min(group.prefill, key=key, default=None), min(group.decode, key=key))
        for group in (aggregated_candidates(engines) if is_aggregated else candidates(engines))
    ]
    if len(best) == 1:
        return best[0]

    def cost(pair: tuple[EngineT | None, EngineT]) -> tuple[int, bool, int]:
        prefill, decode = pair
        return work(decode if prefill is None else prefill) + work(decode), prefill is None, drawn(decode)

    return min(best, key=cost)


def _pair_up(prefill: Sequence[EngineT], decode: Sequence[EngineT]) -> list[Candidates[EngineT]]:
    """Make a group for each kind of decode engine: all engines of a kind can pair with the same prefill engines."""
    kinds: dict[tuple[int, PairingFacts | None], list[EngineT]] = {}
    for engine in decode:
        kinds.setdefault((engine.descriptor.model_version, engine.descriptor.pairing), []).append(engine)
    return [
        Candidates([p for p in prefill if find_refusal(p.descriptor, kind[0].descriptor) is None], kind)
        for kind in kinds.values()
    ]
