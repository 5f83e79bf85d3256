"""What a router is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from actors.core.request import EngineCoreRequest
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import NoEngineAvailable
from kv_transfer.params import PrefixSource


class EngineLoad(Protocol):
    """An engine that serves, as routing sees it; an EngineConnection is one, and so is a simulated engine."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """Which engine."""
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

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """The request has ended on this route, with this output in all, the tokens that it came with included."""
        ...


def candidates(engines: Sequence[EngineT]) -> tuple[list[EngineT], list[EngineT]]:
    """Who may prefill, and who may decode; none to prefill if those that decode do it themselves.

    A pair of engines that do nothing else comes first, then engines of role `both`. With no prefill engine left, decode
    engines serve alone: slower than they should, but they serve. Prefill engines, whose batches and caches are not made
    for it, do not decode.
    Raises NoEngineAvailable, naming the roles that are missing.
    """
    by_role: dict[EngineRole, list[EngineT]] = {role: [] for role in EngineRole}
    for engine in engines:
        by_role[engine.descriptor.role].append(engine)
    prefill, decode = by_role[EngineRole.PREFILL], by_role[EngineRole.DECODE]
    if prefill and decode:
        return prefill, decode
    alone = by_role[EngineRole.BOTH] or decode
    if not alone:
        missing = (EngineRole.DECODE,) if prefill else (EngineRole.PREFILL, EngineRole.DECODE)
        raise NoEngineAvailable(tuple(role.value for role in missing))
    return [], alone
