"""The Ray actor around one ingress: the gRPC server, the serving logic, the sessions with the engines."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from actors.config import ModelFacts
from cluster.config import ClusterConfig
from cluster.engine_connection import EngineDescriptor
from cluster.pool.membership import Membership
from cluster.status import ControllerView


class IngressActor:
    """One ingress. Stateless: everything that it knows comes from the controller and from its clients."""

    def __init__(self, config: ClusterConfig, controller_name: str) -> None:
        """controller_name: of the controller's actor, in this actor's namespace."""
        # Imported here: the driver and the controller handle this class without loading a tokenizer library.
        from cluster.ingress.process import IngressProcess

        self._controller_name = controller_name
        self._process = IngressProcess(config, self._ask_controller)

    async def _ask_controller(self) -> ControllerView:
        # Looked up each time: it may have been restarted meanwhile.
        controller: Any = await asyncio.to_thread(ray.get_actor, self._controller_name)
        view: ControllerView = await controller.status.remote()
        return view

    async def prove(self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts) -> None:
        """Send a canary request through this pair. Raises CanaryFailed."""
        await self._process.prove(prefill, decode, facts)

    async def update_membership(self, membership: Membership) -> None:
        """Follow a newer snapshot."""
        await self._process.update_membership(membership)

    async def start(self, facts: ModelFacts) -> int:
        """Open the doors; returns the port."""
        return await self._process.start(facts)

    async def drain(self, grace_s: float) -> None:
        """Close the doors: running requests get grace_s to end, then they are aborted."""
        await self._process.drain(grace_s)
