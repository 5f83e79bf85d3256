"""One life of one engine: its placement, its actor, how it comes up and how it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.engine_actor import EngineActor, EngineHealth, EngineReady, RankResources
from cluster.config import ClusterConfig
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import CannotStart
from cluster.pool.placement import EnginePlacement
from cluster.pool.ray_calls import one_line, remote_class, within
from cluster.pool.reconciler import EngineState, Slot
from cluster.status import EngineView

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 30.0


class EngineLife:
    """state goes from PENDING to STARTING, then as the controller says. role: the one that it serves in now."""

    def __init__(self, config: ClusterConfig, slot: Slot, incarnation: int, role: EngineRole) -> None:
        self._config = config
        self.slot = slot
        self.incarnation = incarnation
        self.role = role
        self.state = EngineState.PENDING
        self.descriptor: EngineDescriptor | None = None
        self.ready: EngineReady | None = None
        self.node_id = ""
        self.task: asyncio.Task[None] | None = None
        self.drain_until_s: float | None = None
        """On the event loop's clock, while it drains."""
        self._health: EngineHealth | None = None
        self._health_at_s = 0.0
        self._first_silent_s: float | None = None
        self._placement: EnginePlacement | None = None
        self._actor: Any = None  # Ray's handle: its methods come into being at run time.

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.slot.engine_id

    async def bring_up(self, node_id: str | None, say: Callable[[str], None]) -> None:
        """Reserve resources, start the actor, load the model. Raises CannotStart."""
        config, group = self._config, self._config.group(self.slot.role)
        name = f"raypd-{self.engine_id}-{self.incarnation}"
        self._placement = EnginePlacement(config, self.slot.role, name, node_id)
        say(f"{self.engine_id}: waiting for resources")
        await self._placement.ready()
        self.state = EngineState.STARTING
        say(f"{self.engine_id}: starting")
        resources = RankResources(group.num_cpus, group.num_gpus, dict(group.resources))
        actor = remote_class(EngineActor, concurrency_groups={"control": 4}).options(
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            resources=group.resources or None,
            scheduling_strategy=self._placement.strategy(),
        )
        self._actor = actor.remote(config.engine_config(self.slot.role), self.engine_id, self.incarnation, resources)
        watch = asyncio.create_task(self._report_progress(say))
        try:
            self.ready = await self._actor.start.remote(config.engine_host)
        except (RayActorError, RayTaskError) as error:
            raise CannotStart(f"{self.engine_id}: {one_line(error)}") from error
        finally:
            watch.cancel()
        address, facts = self.ready.address, self.ready.facts
        self.node_id = self.ready.node_id
        self.descriptor = EngineDescriptor(
            self.engine_id, self.incarnation, self.role, address, facts.further_rank_addresses
        )
        say(f"{self.engine_id}: loaded, {facts.layout.num_blocks} KV blocks, at {address}")

    async def _report_progress(self, say: Callable[[str], None]) -> None:
        last = "starting"
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            now: str = await self._actor.progress.remote()
            if now != last:
                say(f"{self.engine_id}: {now}")
            last = now

    async def find_fault(self, timeout_s: float) -> str | None:
        """Ask how it is; returns why it has to be given up, if it has to."""
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                health: EngineHealth = await self._actor.health.remote()
        except TimeoutError:
            self._first_silent_s = now_s if self._first_silent_s is None else self._first_silent_s
            silent_s = asyncio.get_running_loop().time() - self._first_silent_s
            logger.warning("an engine is slow to answer", extra={"engine_id": self.engine_id, "silent_s": silent_s})
            return f"it has not answered for {silent_s:.0f} s" if silent_s >= timeout_s else None
        except RayActorError as died:
            return one_line(died)
        self._health, self._health_at_s, self._first_silent_s = health, time.time(), None
        if health.error is not None:
            return health.error
        if health.seconds_in_step > self._config.step_deadline_s:
            return (
                f"a step has taken {health.seconds_in_step:.0f} s (step_deadline_s is {self._config.step_deadline_s:g})"
            )
        return None

    @property
    def is_idle(self) -> bool:
        """Whether it had nothing to do when it was last asked, after it began to drain."""
        if self._health is None:
            return False
        stats = self._health.stats
        num_requests = stats.num_running_reqs + stats.num_waiting_reqs + stats.num_waiting_for_remote_kvs
        return num_requests + stats.num_held_reqs == 0

    def missing(self) -> str:
        """What keeps a pending engine from its place, in words."""
        return "" if self._placement is None else self._placement.missing()

    async def stop(self) -> None:
        """Let it abort what runs, close its links and end."""
        if self._actor is not None:
            await within(self._actor.stop.remote(), _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Nothing of it is left afterwards."""
        if self.task is not None:
            self.task.cancel()
        if self._actor is not None:
            ray.kill(self._actor)
        if self._placement is not None:
            self._placement.release()

    def view(self, last_error: str) -> EngineView:
        """For people."""
        if self.state is EngineState.PENDING:
            last_error = "; ".join(part for part in (last_error, self.missing()) if part)
        return EngineView(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=self.role.value,
            state=self.state.value,
            address=self.descriptor.address if self.descriptor else "",
            last_error=last_error,
            kv_transport=self.ready.facts.kv_transport if self.ready else "",
            node=self.node_id[:8],
            stats=self._health.stats if self._health else None,
            stats_at_s=self._health_at_s,
        )
