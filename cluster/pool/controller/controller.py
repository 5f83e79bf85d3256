"""The controller: an actor that starts, watches and replaces the engines and ingresses of a cluster.

The decisions are pure (reconciler.py, cluster_membership.py). Thin parts that call Ray look after the engines
(engine_fleet.py) and the ingresses (ingress_fleet.py). This file is the actor that ties them together.

Engines and ingresses serve without the controller, and outlive its death: Ray starts the controller again, which loads
its saved state (saved_state.py), finds the engines and ingresses that still run, and goes on. The controller ends when
stop() is called. If the cluster needs its driver, the process that started it, the controller also stops the cluster
when the driver is gone.

If Ray loses the controller's node, it starts the controller on another one. The earlier controller may still run: it
ends once it hears that its node was declared dead, at the latest before its next change (end_replaced()).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import ray

from actors.process.log_lines import write_log_lines
from actors.process.ray_calls import RayCallFailed
from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.observability.request_records import FoundRecords, RecordQuery
from cluster.observability.status import ControllerView
from cluster.planning.plan_record import PlannerMode
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.controller.first_start import FirstStart, warn_of_lost_stores
from cluster.pool.controller.operations import Operations
from cluster.pool.controller.rounds import Rounds, begin_anew, end_replaced
from cluster.pool.controller.saved_state import ControllerReplaced, SavedState, StateStore
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.engines.engine_views import engine_views
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.ingresses.ingress_starter import IngressStarter
from cluster.pool.journal import Journal
from cluster.pool.models import Models
from cluster.pool.planning.planner_rounds import PlannerRounds
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.leftovers import sweep
from cluster.pool.ray_objects.object_names import engine_actor_name, ingress_actor_name, placement_group_name
from cluster.pool.trust_calls import find_trust, make_tls
from cluster.reconciling.engine_slots import EngineState
from cluster.reconciling.reconciler import reconcile, wanted_slots
from cluster.reconciling.rolling_update import RollingUpdate, UpdateLog, find_update
from cluster.routing.engine_connection import EngineRole

logger = logging.getLogger(__name__)

_DRIVER_TIMEOUT_S: Final = 15.0
_LAST_WORD_S: Final = 1.0


class Controller:
    """The controller's Ray actor; there is one in each Ray namespace that holds a cluster."""

    def __init__(self, config: ClusterConfig, *, needs_driver: bool = True) -> None:
        """needs_driver: whether the cluster stops if attend() has not been called for 15 seconds"""
        write_log_lines()
        self._config = config
        self._needs_driver = needs_driver
        self._store = StateStore(config.ray.namespace)
        self._policy = config.restarts
        self._journal = Journal()
        self._models = Models(config)
        self._obstacles = UpdateLog(self._journal.add)
        self._is_stopping = asyncio.Event()
        self._has_news = asyncio.Event()
        self._head = head = HeadProbe()
        self._trust = trust = ClusterTrust(
            config.cluster_secret_file,
            block_hash_key_file=config.block_hash_key_file,
            make_tls=lambda: make_tls(config),
        )
        starter = IngressStarter(config, self._journal, head, self._save, trust)
        self._ingresses = IngressFleet(config, starter, self._journal, head, trust)
        self._fleet = EngineFleet(
            config,
            self._models,
            self._ingresses,
            self._journal,
            self._policy,
            head,
            self._save,
            self._has_news.set,
            trust,
        )
        self._planner = PlannerRounds(
            config, self._fleet, self._ingresses, self._journal, self._save, self._has_news.set
        )
        self._operations = Operations(
            config,
            self._models,
            self._fleet,
            self._ingresses,
            self._journal,
            trust,
            self._save,
            self._has_news.set,
            self._planner.note_manual_change,
        )
        self._fleet.wanted = wanted_slots({role: config.group(role).count for role in EngineRole})
        self._is_open = False
        self._is_saved = True
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._attended_at_s = loop.time()
        has_died = ray.get_runtime_context().was_current_actor_reconstructed
        self._probing = loop.create_task(head.watch(config.heartbeat_interval_s))
        self._going_on = loop.create_task(self._go_on_or_die()) if has_died else None

    # -- from the start to the end -------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Start all engines and ingresses. Returns the ingresses' gRPC addresses once clients are let in.

        Before that, every engine that has room in the Ray cluster has answered its canary requests. The start does not
        wait for engines without room if the others can serve without them. Raises CannotStart.
        """
        await asyncio.to_thread(sweep, self._config.ray.namespace)
        self._trust.begin()
        warn_of_lost_stores(self._config)
        await self._operations.adapters.begin()
        await self._ingresses.start_missing(time.time())
        await self._act()
        await FirstStart(self._config, self._fleet, self._ingresses, self._wait_for_news).wait()
        await self._open()
        if not self._ingresses.addresses:
            raise CannotStart("; ".join(view.last_error for view in self._ingresses.views()))
        self._begin_rounds()
        return self._ingresses.addresses

    async def _open(self) -> None:
        """Let clients in at all ingresses; ingresses that start later let clients in at once."""
        self._is_open = True
        version = max(engine.model_version for engine in self._fleet if engine.state is EngineState.READY)
        await self._ingresses.open(self._fleet.facts(version))
        await self._save()

    async def _go_on_or_die(self) -> None:
        try:
            await self._go_on()
        except Exception:
            await begin_anew("restoring the saved state")

    async def _go_on(self) -> None:
        """Restore the saved state, find the engines and ingresses of the earlier controller, and begin the rounds."""
        state = await self._load()
        if state is None:
            # There is no saved state if the earlier controller died before it started anything, or after it stopped
            # everything.
            await asyncio.to_thread(sweep, self._config.ray.namespace)
            self._end_soon()
            return
        self._journal.restore(state.decisions)
        self._journal.add("go on after the controller's death")
        self._fleet.wanted, self._is_open = list(state.wanted), state.facts is not None
        self._models.restore(state.model_directories)
        self._planner.memory, self._planner.num_manual_changes = state.plan_memory, state.num_manual_changes
        await self._ingresses.restore(state.ingresses, state.membership, state.facts)
        self._fleet.cordoned = set(state.cordoned)
        self._fleet.may_prove.set()
        await self._fleet.restore(state.engines, state.histories, state.roles, state.membership)
        self._trust.restore(
            await find_trust(self._operations.actors, self._config.heartbeat_timeout_s), state.trust_generation
        )
        await self._ingresses.publish(self._fleet.membership)
        kept = [engine.key for engine in self._fleet]
        actors = {engine_actor_name(key) for key in kept}
        actors |= {ingress_actor_name(one.number, one.incarnation) for one in state.ingresses}
        groups = {placement_group_name(self._config.ray.namespace, key) for key in kept}
        await asyncio.to_thread(sweep, self._config.ray.namespace, actors, groups)
        self._begin_rounds()

    async def _load(self) -> SavedState | None:
        while True:
            try:
                return await self._store.load()
            except RayCallFailed as failed:
                logger.warning("Ray's head does not answer", extra={"error": str(failed)})
                await asyncio.sleep(_LAST_WORD_S)

    async def attend(self) -> bool:
        """Note that the process that started the cluster is still there. Returns whether the cluster goes on."""
        self._attended_at_s = asyncio.get_running_loop().time()
        return not self._is_stopping.is_set()

    async def stop(self) -> None:
        """Drain the ingresses, stop the engines, and release the placement groups; then end this actor."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        self._has_news.set()
        await self._settle()
        self._planner.close()
        await asyncio.gather(*self._tasks)
        await self._ingresses.stop(self._config.drain_timeout_s)
        await self._fleet.stop()
        await self._store.clear()
        self._end_soon()

    def _end_soon(self) -> None:
        """Let Ray kill this actor a second from now, after stop() has answered: Ray restarts actors that just exit."""
        me = ray.get_runtime_context().current_actor
        asyncio.get_running_loop().call_later(_LAST_WORD_S, ray.kill, me)

    async def _settle(self) -> None:
        """Wait until the state of an earlier controller is restored: changes before that would be overwritten."""
        if self._going_on is not None:
            await asyncio.shield(self._going_on)

    # -- what operators ask for ----------------------------------------------------------------------------------

    async def progress(self, after: int) -> list[str]:
        """Return the events of the start after the first `after` ones."""
        return self._fleet.progress.after(after)

    async def addresses(self) -> list[str]:
        """Return host:port of the gRPC API of every open ingress."""
        return self._ingresses.addresses

    async def http_addresses(self) -> list[str]:
        """Return host:port of every open ingress's HTTP API."""
        return self._ingresses.http_addresses

    async def status(self) -> ControllerView:
        """Return every engine and ingress as last observed, every quarantined slot, and the newest decisions."""
        await self._settle()
        engines = await engine_views(self._fleet, self._policy, time.time())
        update = self._update_under_way()
        return ControllerView(
            engines,
            self._journal.decisions,
            self._ingresses.views(),
            "" if update is None else str(update),
            plan=self._planner.record,
        )

    async def find_records(self, query: RecordQuery, asker: str) -> FoundRecords:
        """Ask every ingress but the asker for the records of a request."""
        await self._settle()
        return await self._ingresses.find_records(query, asker)

    async def operate(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Call the method of OperatorVerbs that `verb` names, with these arguments, and return its result."""
        await self._settle()
        return await getattr(self._operations, verb)(*arguments, **options)

    # -- rounds --------------------------------------------------------------------------------------------------

    def _begin_rounds(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        rounds = Rounds(self._journal, self._head, self._is_stopping)
        engines = rounds.repeat(
            "looking after engines", self._look_after_engines, lambda: self._wait_for_news(interval_s)
        )
        ingresses = rounds.repeat(
            "looking after ingresses", self._look_after_ingresses, lambda: self._wait_for_stop(interval_s)
        )
        self._tasks = [asyncio.create_task(engines), asyncio.create_task(ingresses)]
        if self._config.planner.mode is not PlannerMode.NONE:
            planning = rounds.repeat("planning", self._planner.look, lambda: self._wait_for_stop(interval_s))
            self._tasks.append(asyncio.create_task(planning))

    async def _wait_for_news(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return
        self._has_news.clear()

    async def _wait_for_stop(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_stopping.wait()
        except TimeoutError:
            return

    async def _look_after_engines(self) -> None:
        is_alone = asyncio.get_running_loop().time() > self._attended_at_s + _DRIVER_TIMEOUT_S
        if self._needs_driver and is_alone and self._head.is_answering:
            self._journal.add("stop: whoever started this cluster is gone")
            self._stopping = asyncio.create_task(self.stop())
            return
        await self._act()
        if not self._is_saved:
            await self._save()

    async def _look_after_ingresses(self) -> None:
        version = await self._ingresses.look(time.time(), self._fleet.cordoned)
        await self._fleet.catch_up_with(version)
        if self._trust.is_rotating:
            await self._operations.finish_rotation()
        if not self._is_open and any(engine.state is EngineState.READY for engine in self._fleet):
            await self._open()

    async def _act(self) -> None:
        now_s, fleet = time.time(), self._fleet
        self._obstacles.tell(self._update_under_way())
        newest = self._models.newest
        for action in reconcile(fleet.wanted, fleet.observed(), fleet.histories, self._policy, now_s, newest):
            await fleet.act(action)

    def _update_under_way(self) -> RollingUpdate | None:
        fleet, newest = self._fleet, self._models.newest
        return find_update(fleet.wanted, fleet.observed(), fleet.histories, self._policy, time.time(), newest)

    async def _save(self) -> None:
        if self._is_stopping.is_set():
            return
        try:
            await self._store.save(self._state)
            self._is_saved = True
        except ControllerReplaced:
            end_replaced()
        except RayCallFailed as failed:
            self._is_saved = False
            logger.warning("the controller's state was not saved", extra={"error": str(failed)})

    def _state(self) -> SavedState:
        return SavedState(
            wanted=tuple(self._fleet.wanted),
            histories=self._fleet.histories,
            roles=self._fleet.roles,
            engines=self._fleet.saved(),
            membership=self._fleet.membership,
            model_directories=self._models.directories,
            ingresses=self._ingresses.saved(),
            facts=self._ingresses.facts,
            cordoned=frozenset(self._fleet.cordoned),
            decisions=self._journal.decisions,
            trust_generation=self._trust.generation,
            plan_memory=self._planner.memory,
            num_manual_changes=self._planner.num_manual_changes,
        )
