"""One incarnation of an engine in the controller: its placement group, its actor, its start and its health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.adapter import Adapter
from actors.engine_actor import EngineActor, EngineHealth, EngineReady
from actors.engine_profile import EngineProfile
from actors.process.ray_calls import FailureKind, RayCallFailed, call
from actors.ranks.rank_resources import RankResources
from cluster.config import ClusterConfig
from cluster.errors import CannotStart, EngineRefused
from cluster.observability.status import EngineView
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.engines.engine_placement import EnginePlacement
from cluster.pool.engines.key_orders import KeyOrders
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.heartbeat import ActorLost, Heartbeat
from cluster.pool.ray_objects.object_names import engine_actor_name, placement_group_name
from cluster.pool.ray_objects.ray_actors import call_if_alive, end_actor, find_by_name, remote_class
from cluster.pool.trust_calls import give_trust
from cluster.reconciling.engine_slots import EngineState, Slot
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 30.0
_REASK_DELAY_S = 0.5
_ANSWER_TIMEOUT_S = 3.0
_LOAD_ADAPTER_TIMEOUT_S = 25.0
_ENDING_WAIT_S = 60.0
"""How long one call of wait_for_end() lasts. The call of a dead controller occupies one of the engine's control calls
for this time at most.
"""


@dataclass(frozen=True, slots=True)
class SavedEngine:
    """The saved state of one incarnation of an engine, for a later controller.

    ready, descriptor: set once the engine has loaded its model
    """

    slot: Slot
    incarnation: int
    role: EngineRole
    state: EngineState
    model_version: int
    ready: EngineReady | None
    descriptor: EngineDescriptor | None


class EngineIncarnation:
    """One incarnation of an engine.

    bring_up() moves the state from PENDING to STARTING; the controller sets all further states. role is the role in
    which the engine serves now. The actor and the placement group outlive the controller, and a later controller finds
    them by their names.
    """

    def __init__(
        self,
        config: ClusterConfig,
        slot: Slot,
        incarnation: int,
        role: EngineRole,
        model_version: int,
        trust: ClusterTrust,
        *,
        key_orders: KeyOrders,
    ) -> None:
        """Describe an incarnation that is not started yet.

        config: the cluster's settings with the model of model_version
        trust:  the secrets that the engine gets
        key_orders: chooses the order of keys that all engines share
        """
        self._config = config
        self._trust = trust
        self._key_orders = key_orders
        self.slot = slot
        self.incarnation = incarnation
        self.role = role
        self.model_version = model_version
        self.state = EngineState.PENDING
        self.descriptor: EngineDescriptor | None = None
        self.ready: EngineReady | None = None
        self.task: asyncio.Task[None] | None = None
        self._begun_at_s = asyncio.get_running_loop().time()
        self.drain_until_s: float | None = None
        """When the drain ends at the latest, on the event loop's clock; None while the engine does not drain."""
        self._health: EngineHealth | None = None
        self._health_at_s = 0.0
        self._heartbeat = Heartbeat()
        self._preferred_node_id = ""
        self._ending: asyncio.Future[str] | None = None
        self._placement: EnginePlacement | None = None
        self._actor: Any = None  # Any: Ray defines an actor handle's methods at run time.

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.slot.engine_id

    @property
    def key(self) -> EngineKey:
        """The engine's name and incarnation."""
        return self.engine_id, self.incarnation

    @property
    def actor(self) -> Any:
        """Ray's handle of the actor; None before the actor is started."""
        return self._actor

    @property
    def node_id(self) -> str:
        """Ray's id of the engine's node; before the model is loaded, of the preferred node, and "" if there is none."""
        return self._preferred_node_id if self.ready is None else self.ready.node_id

    @property
    def stats(self) -> SchedulerStats | None:
        """The newest counters; None if none have come."""
        return None if self._health is None else self._health.stats

    @property
    def age_s(self) -> float:
        """Seconds since the decision to start the engine, or since this controller has found it."""
        return asyncio.get_running_loop().time() - self._begun_at_s

    @property
    def drained_s(self) -> float:
        """Seconds since the begin of the drain; 0 if there is none."""
        if self.drain_until_s is None:
            return 0.0
        return asyncio.get_running_loop().time() - self.drain_until_s + self._config.drain_timeout_s

    def limit_drain(self) -> None:
        """Let the drain begin now, and end after drain_timeout_s at the latest."""
        self.drain_until_s = asyncio.get_running_loop().time() + self._config.drain_timeout_s

    @property
    def finds_no_room(self) -> bool:
        """Whether the engine has waited for its resources for place_timeout_s or longer."""
        waited_s = asyncio.get_running_loop().time() - self._begun_at_s
        return self.state is EngineState.PENDING and waited_s >= self._config.place_timeout_s

    async def bring_up(self, node_id: str | None, avoided: Iterable[str], say: Callable[[str], None]) -> None:
        """Reserve resources, start the actor and load the model. Raises CannotStart.

        node_id: Ray's id of the preferred node
        avoided: ids of nodes where the engine must not run
        say:     is called with each step of the start, in words
        """
        self._preferred_node_id = node_id or ""
        config, group = self._config, self._config.group(self.slot.role)
        name = placement_group_name(config.ray.namespace, self.key)
        self._placement = await EnginePlacement.reserve(config, self.slot.role, name, node_id, avoided)
        say(f"{self.engine_id}: waiting for resources")
        await self._placement.ready()
        self.state = EngineState.STARTING
        say(f"{self.engine_id}: starting")
        resources = RankResources(group.num_cpus, group.num_gpus, dict(group.resources))
        actor = remote_class(EngineActor, concurrency_groups={"control": 32}).options(
            name=engine_actor_name(self.key),
            lifetime="detached",
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            resources=group.resources or None,
            scheduling_strategy=self._placement.strategy(),
        )
        settings = config.engine_config(self.slot.role).model_copy(update={"role": self.role.value})
        self._actor = actor.remote(settings, self.engine_id, self.incarnation, resources)
        await self.wait_loaded(say)

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Empty the engine's prefix cache. Returns whether that was possible. Raises EngineRefused."""
        is_reset: bool = await self._ask_for(self._actor.reset_prefix_cache, preempt, timeout_s=_STOP_TIMEOUT_S)
        return is_reset

    async def set_role(self, role: EngineRole) -> None:
        """Let the engine mix as much prefill into its steps as a role does. Raises EngineRefused."""
        await self._ask_for(self._actor.set_role, role.value, timeout_s=_STOP_TIMEOUT_S)

    async def profile(self, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Run the profiler in the engine for duration_s seconds. Raises EngineRefused."""
        timeout_s = duration_s + _STOP_TIMEOUT_S
        profile: EngineProfile = await self._ask_for(self._actor.profile, duration_s, with_trace, timeout_s=timeout_s)
        return profile

    async def _ask_for(self, method: Any, *arguments: Any, timeout_s: float) -> Any:
        try:
            return await call(method, *arguments, timeout_s=timeout_s)
        except RayCallFailed as failed:
            raise EngineRefused(self.engine_id, str(failed)) from failed

    async def wait_loaded(self, say: Callable[[str], None]) -> None:
        """Wait until the actor has loaded the model. Raises CannotStart, after start_timeout_s at the latest."""
        watch = asyncio.create_task(self._report_progress(say))
        timeout_s = self._config.start_timeout_s
        try:
            await call(self._actor.use_trust, await self._trust.material(), timeout_s=timeout_s)
            report = partial(call, self._actor.report_attention, timeout_s=timeout_s)
            key_order = await self._key_orders.of_engine(self.engine_id, report)
            host = self._config.engine_host
            ready: EngineReady = await call(self._actor.start, host, key_order, timeout_s=timeout_s)
        except RayCallFailed as failed:
            is_late = failed.kind is FailureKind.TIMED_OUT
            why = f"it has not loaded within {timeout_s:g} s" if is_late else str(failed)
            raise CannotStart(f"{self.engine_id}: {why}") from failed
        finally:
            watch.cancel()
        self.ready = ready
        address, facts = ready.address, ready.facts
        self.descriptor = EngineDescriptor(
            self.engine_id,
            self.incarnation,
            self.role,
            address,
            facts.further_rank_addresses,
            facts.pairing,
            self.model_version,
        )
        took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in ready.phases_s.items())
        say(f"{self.engine_id}: loaded ({took}), {facts.layout.num_blocks} KV blocks, at {address}")

    async def find(self, saved: SavedEngine) -> bool:
        """Find the actor and the placement group that an earlier controller has made. Returns whether both exist."""
        self._actor = await find_by_name(ray.get_actor, engine_actor_name(self.key))
        name = placement_group_name(self._config.ray.namespace, self.key)
        self._placement = await EnginePlacement.find(self._config, self.slot.role, name)
        if self._actor is None or self._placement is None:
            return False
        self.state, self.ready, self.descriptor = saved.state, saved.ready, saved.descriptor
        return True

    def saved(self) -> SavedEngine:
        """Return what a later controller has to know of this incarnation."""
        return SavedEngine(
            self.slot, self.incarnation, self.role, self.state, self.model_version, self.ready, self.descriptor
        )

    async def _report_progress(self, say: Callable[[str], None]) -> None:
        last = "starting"
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            try:
                now: str = await call(self._actor.progress, timeout_s=_ANSWER_TIMEOUT_S)
            except RayCallFailed:
                # If the actor has died, wait_loaded() raises the error.
                continue
            if now != last:
                say(f"{self.engine_id}: {now}")
            last = now

    async def look(self, head: HeadProbe) -> str | None:
        """Wait for the engine's end or the next heartbeat. Returns why the engine has to be given up, or None."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(_ending_of(self._actor))
        done, _ = await asyncio.wait({self._ending}, timeout=self._config.heartbeat_interval_s)
        if done:
            return self._ending.result()
        return await self._ask(head)

    async def _ask(self, head: HeadProbe) -> str | None:
        try:
            health: EngineHealth | None = await self._heartbeat.ask(
                self._actor.health, head, self._config.heartbeat_timeout_s
            )
        except ActorLost as lost:
            return str(lost)
        if health is None:
            silent_s = self._heartbeat.silent_s
            logger.warning("an engine is slow to answer", extra={"engine_id": self.engine_id, "silent_s": silent_s})
            return None
        self._health, self._health_at_s = health, time.time()
        if health.error is not None:
            return health.error
        if health.trust_generation < self._trust.generation:
            await give_trust(self._actor, self._trust)
        deadline_s = self._config.step_deadline_s
        if health.seconds_in_step > deadline_s:
            return f"a step has taken {health.seconds_in_step:.0f} s (step_deadline_s is {deadline_s:g})"
        if health.loop_busy_s > deadline_s:
            return f"its event loop has been busy for {health.loop_busy_s:.0f} s (step_deadline_s is {deadline_s:g})"
        return None

    async def load_adapter(self, adapter: Adapter) -> str | None:
        """Load an adapter into the engine. Returns why the engine cannot load it, or None.

        An engine that dies meanwhile counts as one that can: the error is logged only.
        """
        try:
            failure: str | None = await call(self._actor.load_adapter, adapter, timeout_s=_LOAD_ADAPTER_TIMEOUT_S)
        except RayCallFailed as failed:
            if failed.kind is FailureKind.TIMED_OUT:
                return f"it was not loaded within {_LOAD_ADAPTER_TIMEOUT_S:g} s"
            logger.warning("an adapter was not loaded", extra={"engine_id": self.engine_id, "error": str(failed)})
            return None
        return failure

    async def answers(self) -> bool:
        """Ask the engine whether it is well. Returns False if it does not answer within three seconds."""
        try:
            health: EngineHealth = await call(self._actor.health, timeout_s=_ANSWER_TIMEOUT_S)
        except RayCallFailed:
            return False
        return health.error is None

    @property
    def is_silent(self) -> bool:
        """Whether the engine has not answered the last heartbeat."""
        return self._heartbeat.is_silent

    @property
    def is_asked_to_end(self) -> bool:
        """Whether the engine's process has got SIGTERM, as when its pod or node is shut down."""
        return self._health is not None and self._health.is_asked_to_end

    @property
    def is_idle(self) -> bool:
        """Whether the engine had no request at the last heartbeat, and has answered that heartbeat."""
        return self._health is not None and self._health.is_idle and not self.is_silent

    def missing(self) -> str:
        """Return, in words, which resources a pending engine waits for."""
        return "its placement group is being made" if self._placement is None else self._placement.missing()

    async def stop(self) -> None:
        """Let the engine abort its requests, close its links and end."""
        if self._actor is not None:
            await call_if_alive(self._actor.stop, timeout_s=_STOP_TIMEOUT_S)

    async def kill(self) -> None:
        """Kill the engine's actor, release its placement group, and cancel the tasks that watch it."""
        for task in (self.task, self._ending):
            if task is not None:
                task.cancel()
        if self._actor is not None:
            await end_actor(self._actor)
        if self._placement is not None:
            await self._placement.release()

    def view(self, last_error: str, missing: str = "") -> EngineView:
        """Return the engine's status for `raypd status`. missing: the result of missing(), if the engine is pending"""
        last_error = "; ".join(part for part in (last_error, missing) if part)
        return EngineView(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=self.role.value,
            state=self.state.value,
            address=self.descriptor.address if self.descriptor else "",
            last_error=last_error,
            kv_transport=self.ready.facts.kv_transport if self.ready else "",
            node=self.ready.node_address if self.ready else "",
            model_version=self.model_version,
            attention_backend=self.ready.facts.attention_backend if self.ready else "",
            attention_reason=self.ready.facts.attention_reason if self.ready else "",
            linear_layers=self.ready.facts.linear_layers if self.ready else "",
            cpu_threads=self.ready.facts.cpu_threads if self.ready else "",
            cuda_graphs=self.ready.facts.cuda_graphs if self.ready else "",
            dtype=self.ready.facts.dtype if self.ready else "",
            left_out_inputs=self.ready.facts.left_out_inputs if self.ready else "",
            stats=self._health.stats if self._health else None,
            stats_at_s=self._health_at_s,
        )


async def _ending_of(actor: Any) -> str:
    """Wait until the actor has died, which ends a call to it with an error. Returns the reason."""
    while True:
        try:
            await call(actor.wait_for_end, _ENDING_WAIT_S, timeout_s=2 * _ENDING_WAIT_S)
        except RayCallFailed as failed:
            if not failed.is_silence:
                return str(failed)
            await asyncio.sleep(_REASK_DELAY_S)
