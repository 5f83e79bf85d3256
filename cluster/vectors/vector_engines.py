"""Which engines give vectors: those that compute prompts.

A decode engine never does, also where there is no other: its batch would wait for every prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import Route, Router
from cluster.routing.engine_connection import EngineConnection, EnginePool, EngineRole


class VectorEngines:
    """An EnginePool without the engines that only decode."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines

    def snapshot(self) -> Sequence[EngineConnection]:
        """The engines that compute prompts and serve now."""
        return [engine for engine in self._engines.snapshot() if engine.descriptor.role.computes_prompts]

    def next_change(self) -> asyncio.Event:
        """An event that is set when engines have come since this call."""
        return self._engines.next_change()


def choose_engine(router: Router, request: EngineCoreRequest, engines: EnginePool) -> Route[EngineConnection]:
    """The router's choice among the prefill engines, or those that do both where there are none; as decode.

    Raises NoEngineAvailable, ModelVersionLeft.
    """
    present = [engine for engine in engines.snapshot() if engine.descriptor.role.computes_prompts]
    if not present:
        raise NoEngineAvailable("computes prompts")
    prefill = [engine for engine in present if engine.descriptor.role is EngineRole.PREFILL]
    return router.choose(request, prefill or present)
