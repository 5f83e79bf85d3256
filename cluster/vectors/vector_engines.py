"""Restricts requests for vectors to engines that compute prompts.

A decode engine never gets such a request, even if no other engine serves: its batch would wait for every prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineT, Route, Router
from cluster.routing.engine_connection import EngineConnection, EnginePool, EngineRole


class VectorEngines:
    """An EnginePool without the engines that only decode."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines

    def snapshot(self) -> Sequence[EngineConnection]:
        """Return the engines that compute prompts and serve now."""
        return [engine for engine in self._engines.snapshot() if engine.descriptor.role.computes_prompts]

    def next_change(self) -> asyncio.Event:
        """Return an event that is set once engines have come after this call."""
        return self._engines.next_change()


@dataclass(frozen=True, slots=True)
class VectorRouter:
    """A Router for requests for vectors: each prompt goes to one engine, which computes prompts."""

    router: Router

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a prefill engine, or an engine of role `both` if there is none. Raises NoEngineAvailable."""
        present = [engine for engine in engines if engine.descriptor.role.computes_prompts]
        if not present:
            raise NoEngineAvailable("computes prompts")
        prefill = [engine for engine in present if engine.descriptor.role is EngineRole.PREFILL]
        return self.router.choose(request, prefill or present)

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Let the prompt stay where it is."""
        return None

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Tell the other router."""
        self.router.on_start(request, route)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Do nothing: a vector adds no tokens to what is cached."""

    def on_leave(self, request_id: str) -> None:
        """Tell the other router."""
        self.router.on_leave(request_id)
