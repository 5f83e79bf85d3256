"""What a router is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cluster.engine_connection import EngineDescriptor


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
    """The engines that serve a request. prefill is None if decode does the prefill itself."""

    prefill: EngineT | None
    decode: EngineT


class Router(Protocol):
    """A routing policy."""

    def choose(self, num_prompt_tokens: int, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose among the engines that serve. Raises NoEngineAvailable, naming the missing roles."""
        ...
