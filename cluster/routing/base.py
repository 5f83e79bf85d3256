"""The interface of a router: the engines that it chooses from, and the route that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
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
        """How many requests it has, as far as the asker knows."""
        ...


EngineT = TypeVar("EngineT", bound=EngineLoad)


@dataclass(frozen=True, slots=True)
class Route(Generic[EngineT]):
    """The engines that serve a request. prefill is None if decode does the prefill itself.

    prefix_source: an engine that is thought to have more of the prompt's KV than the one that is to prefill it
    """

    prefill: EngineT | None
    decode: EngineT
    prefix_source: PrefixSource | None = None


class Router(Protocol):
    """A routing policy. Its calls return at once; it may keep notes of what it is told."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose among the engines that serve. Raises NoEngineAvailable."""
        ...

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """The request has been submitted to this route's engines: what takes time need not delay it."""
        ...

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """The request has ended on this route, with this output in all, the tokens that it came with included."""
        ...


@dataclass(frozen=True, slots=True)
class Candidates(Generic[EngineT]):
    """Engines that can work together: each of these prefill engines may hand over to each of these decode engines.

    prefill: empty if those that decode do the prefill themselves
    """

    prefill: list[EngineT]
    decode: list[EngineT]


def candidates(engines: Sequence[EngineT]) -> list[Candidates[EngineT]]:
    """Return the engines that may prefill and those that may decode, never two that cannot hand over to each other.

    Pairs of engines that do nothing else come first, and beside them decode engines that none of the prefill engines
    can hand over to, which serve alone. Where there is no pair: engines of role `both`, else decode engines alone, and
    as a last resort prefill engines alone. Their batches and caches are not made for it, but a slow answer is better
    than none.
    Raises NoEngineAvailable if there is no engine at all.
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


def choose_pair(engines: Sequence[EngineT], work: Callable[[EngineT], int]) -> tuple[EngineT | None, EngineT]:
    """The prefill and the decode engine that have the least work together; None and an engine that does all of it.

    An engine that serves alone does the work of both. Of those with equal work the one with the fewest unfinished
    requests is chosen, then the one with the smaller id; a pair goes before an engine alone.
    Raises NoEngineAvailable.
    """

    def key(engine: EngineT) -> tuple[int, int, str]:
        return work(engine), engine.num_unfinished_requests, engine.descriptor.engine_id

    best: list[tuple[EngineT | None, EngineT]] = [
        (min(group.prefill, key=key, default=None), min(group.decode, key=key)) for group in candidates(engines)
    ]
    if len(best) == 1:
        return best[0]

    def cost(pair: tuple[EngineT | None, EngineT]) -> tuple[int, bool, str]:
        prefill, decode = pair
        return work(decode if prefill is None else prefill) + work(decode), prefill is None, decode.descriptor.engine_id

    return min(best, key=cost)


def _pair_up(prefill: Sequence[EngineT], decode: Sequence[EngineT]) -> list[Candidates[EngineT]]:
    """One group for each kind of decode engine: engines of a kind can pair with the same others."""
    kinds: dict[tuple[int, PairingFacts | None], list[EngineT]] = {}
    for engine in decode:
        kinds.setdefault((engine.descriptor.model_version, engine.descriptor.pairing), []).append(engine)
    return [
        Candidates([p for p in prefill if find_refusal(p.descriptor, kind[0].descriptor) is None], kind)
        for kind in kinds.values()
    ]
