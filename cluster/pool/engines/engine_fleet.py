"""The engines of a cluster in the controller: their start, canary, membership, health and end.

The reconciler decides what to start, drain and remove; this file carries it out. An engine enters the membership once a
canary request through it has given the right tokens, and leaves it when it is removed. Every change that a later
controller has to know is saved before it takes effect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from actors.core.requests.adapter import Adapter
from actors.model_facts import ModelFacts
from cluster.config import ClusterConfig
from cluster.errors import CannotStart, UnknownEngine
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.engines.engine_incarnation import EngineIncarnation, SavedEngine
from cluster.pool.engines.engine_placement import can_hold, choose_node
from cluster.pool.engines.key_orders import KeyOrders
from cluster.pool.engines.role_change import change_role
from cluster.pool.engines.start_progress import ProgressLog
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.journal import Journal
from cluster.pool.models import Models
from cluster.pool.owned_tasks import OwnedTasks
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.ray_actors import one_line
from cluster.pool.ray_objects.ray_nodes import alive_nodes
from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.reconciling.reconciler import DrainEngine, RemoveEngine, StartEngine
from cluster.reconciling.switch_clock import SwitchClock
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.pairing import find_refusal
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.settings.restarts import RestartConfig

logger = logging.getLogger(__name__)

Pair = tuple[EngineDescriptor | None, EngineDescriptor]
_SILENT_NODE_S: Final = 90.0
"""The time for which a node with a silent engine is avoided: longer than Ray's default (65 s) to detect a dead node."""
_NUM_IDLE_LOOKS: Final = 2
"""A draining engine is idle after this number of idle heartbeats in a row: requests sent before may arrive late."""
_WATCHED: Final = frozenset({EngineState.READY, EngineState.DRAINING})


class EngineFleet:
    """All engines of a cluster. Only the controller's event loop uses this object.

    membership: the newest one, which is also saved and sent to the ingresses
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: Models,
        ingresses: IngressFleet,
        journal: Journal,
        policy: RestartConfig,
        head: HeadProbe,
        save: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
        trust: ClusterTrust,
    ) -> None:
        """Begin without engines.

        head:      the probe of Ray's head
        save:      saves the controller's state
        on_change: is called after every change on which the reconciler may act
        trust:     the cluster's secrets
        """
        self._config = config
        self._trust = trust
        self._models = models
        self._ingresses = ingresses
        self._journal = journal
        self._policy = policy
        self._head = head
        self._save = save
        self._on_change = on_change
        self._engines: dict[Slot, EngineIncarnation] = {}
        self._key_orders = KeyOrders(config, journal.add)
        self._watches = OwnedTasks()
        self._endings = OwnedTasks()
        self._silent_until_s: dict[str, float] = {}
        """Until when a node with a silent engine is avoided, by node id, on the event loop's clock."""
        self.wanted: list[Slot] = []
        """The slots that should have one engine each."""
        self.histories: dict[Slot, SlotHistory] = {}
        self.roles: dict[Slot, EngineRole] = {}
        """The current role of each slot whose role was changed."""
        self.cordoned: set[str] = set()
        """Ids of the nodes on which no engine may start."""
        self.membership = Membership(0, ())
        self.progress = ProgressLog()
        self.switch_clock = SwitchClock()
        self.may_prove = asyncio.Event()
        """Set once canaries may be sent: at the first start when all engines have loaded, since canaries need pairs."""

    def __iter__(self) -> Iterator[EngineIncarnation]:
        return iter(list(self._engines.values()))

    def observed(self) -> list[ObservedEngine]:
        """Return the state of each engine, for the reconciler."""
        return [ObservedEngine(e.slot, e.incarnation, e.state, e.model_version, e.finds_no_room) for e in self]

    def actors(self) -> list[Any]:
        """Return Ray's handle of every engine whose actor is started."""
        return [engine.actor for engine in self if engine.actor is not None]

    def history(self, slot: Slot) -> SlotHistory:
        """Return the history of a slot's engines."""
        return self.histories.get(slot, SlotHistory())

    def serving(self, engine_id: str) -> EngineIncarnation:
        """Return the engine of this name that serves. Raises UnknownEngine if none does."""
        for engine in self:
            if engine.engine_id == engine_id and engine.state is EngineState.READY:
                return engine
        raise UnknownEngine(engine_id, sorted(e.engine_id for e in self if e.state is EngineState.READY))

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        """Empty the prefix cache of one engine, or of all serving engines if engine_id is "".

        Returns for each engine whether that was possible. Raises UnknownEngine, EngineRefused.
        """
        serving = [engine for engine in self if engine.state is EngineState.READY]
        engines = [self.serving(engine_id)] if engine_id else serving
        answers = await asyncio.gather(*(engine.reset_prefix_cache(preempt=preempt) for engine in engines))
        return {engine.engine_id: is_reset for engine, is_reset in zip(engines, answers, strict=True)}

    # -- what the reconciler asks for ----------------------------------------------------------------------------

    async def act(self, action: StartEngine | DrainEngine | RemoveEngine) -> None:
        """Carry out a decision of the reconciler. Engines start and end in background tasks."""
        match action:
            case StartEngine():
                await self._begin(action)
            case DrainEngine(slot):
                if action.updates_to:
                    self.histories.setdefault(slot, SlotHistory()).updated_to = action.updates_to
                await self.drain(self._engines[slot], action.reason)
            case RemoveEngine():
                await self._remove(action)

    async def _begin(self, action: StartEngine) -> None:
        slot, incarnation = action.slot, action.incarnation
        role, version = self.roles.get(slot, slot.role), self._models.newest
        config = self._models.config(version)
        engine = EngineIncarnation(config, slot, incarnation, role, version, self._trust, key_orders=self._key_orders)
        self._engines[slot] = engine
        self.histories.setdefault(slot, SlotHistory()).last_incarnation = incarnation
        self._journal.add(f"start {slot.engine_id}, incarnation {incarnation}: {action.reason}")
        # Save before the start: a later controller must not give the same incarnation number to another engine.
        await self._save()
        engine.task = asyncio.create_task(self._bring_in(engine, self._bring_up(engine)))

    async def _bring_up(self, engine: EngineIncarnation) -> None:
        """Start an engine on the preferred node that fits, and on a node with a silent engine only if no other fits."""
        nodes = [node for node in await alive_nodes() if node.node_id not in self.cordoned]
        fitting = [node.node_id for node in nodes if can_hold(node, self._config, engine.slot.role)]
        now_s = asyncio.get_running_loop().time()
        answering = [node for node in fitting if now_s >= self._silent_until_s.get(node, 0.0)]
        # Nothing is awaited before the engine has its preferred node, so engines that start together see each other's
        # nodes.
        crowd: dict[str, list[EngineRole]] = {}
        for other in self:
            crowd.setdefault(other.node_id, []).append(other.role)
        node_id = choose_node(engine.role, answering or fitting, crowd)
        await engine.bring_up(node_id, self.cordoned, self.progress.say)

    async def _bring_in(self, engine: EngineIncarnation, bring_up: Awaitable[None]) -> None:
        """Wait until an engine has loaded, send its canary, and let the engine serve; if any of it fails, give it up.

        A later round starts the next engine of the slot, with a growing delay.
        """
        try:
            await bring_up
            await self._save()
            self._on_change()
            await self.may_prove.wait()
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._prove(engine)
                await self._ingresses.prepare(self._served_model(engine))
            await self._admit(engine)
        except Exception as error:
            # Any error means that the engine cannot serve: it is given up, and the error is shown to operators.
            logger.debug("an engine did not come up", exc_info=True)
            self._mark_dead(engine, one_line(error))

    async def drain(self, engine: EngineIncarnation, reason: str) -> None:
        """Give an engine no new requests; it is removed once it is idle, or after drain_timeout_s."""
        engine.state = EngineState.DRAINING
        engine.limit_drain()
        self._journal.add(f"drain {engine.engine_id}, incarnation {engine.incarnation}: {reason}")
        await self.publish(self.membership.with_draining(*engine.key))

    async def set_role(self, engine: EngineIncarnation, role: EngineRole, reason: str = "asked for") -> None:
        """Change an engine's role and publish the new membership; see role_change.py. Raises EngineRefused."""
        await engine.set_role(role)
        self.roles[engine.slot] = role
        membership = change_role(engine, role, self.membership)
        self._journal.add(f"let {engine.engine_id} serve as {role.value}: {reason}")
        await self.publish(membership)

    async def load_adapter(self, adapter: Adapter) -> list[str]:
        """Load an adapter into every serving engine. Returns the reasons of the engines that cannot load it.

        An engine that starts later, or has no room for the adapter, loads it when a request needs it.
        """
        serving = [engine for engine in self if engine.state is EngineState.READY]
        refusals = await asyncio.gather(*(engine.load_adapter(adapter) for engine in serving))
        return [
            f"{engine.engine_id}: {refusal}"
            for engine, refusal in zip(serving, refusals, strict=True)
            if refusal is not None
        ]

    async def _remove(self, action: RemoveEngine) -> None:
        engine = self._engines.pop(action.slot)
        self._journal.add(f"remove {engine.engine_id}, incarnation {engine.incarnation}: {action.reason}")
        await self.publish(self.membership.without_engine(*engine.key))
        # The engine ends in the background: Ray keeps its resources reserved until then.
        self._endings.start(_end(engine))
        # The slot is free, so the next round can begin at once.
        self._on_change()

    def _mark_dead(self, engine: EngineIncarnation, error: str) -> None:
        if engine.state is EngineState.DEAD:
            return
        logger.error("an engine died", extra={"engine_id": engine.engine_id, "error": error})
        engine.state = EngineState.DEAD
        history, now_s = self.history(engine.slot), time.time()
        history.add_death(now_s, error, self._policy)
        if engine.is_silent:
            self._silent_until_s[engine.node_id] = asyncio.get_running_loop().time() + _SILENT_NODE_S
        self._journal.add(f"give up {engine.engine_id}, incarnation {engine.incarnation}: {error}")
        if history.is_quarantined(now_s, self._policy):
            self._journal.add(f"quarantine {engine.engine_id}: it died {len(history.deaths_s)} times, last of: {error}")
        self._on_change()

    # -- canaries and the membership -----------------------------------------------------------------------------

    async def _prove(self, engine: EngineIncarnation) -> None:
        """Send a canary request through the engine, in a pair with another engine if possible. Raises CannotStart.

        If the partner does not answer after a failed canary, the partner is given up and the engine is tried again.
        """
        while True:
            partner = self._partner_of(engine)
            prefill, decode = _pair(engine, partner)
            names = decode.engine_id if prefill is None else f"{prefill.engine_id} -> {decode.engine_id}"
            self.progress.say(f"{names}: canary request")
            try:
                facts = self.facts(engine.model_version)
                return await self._ingresses.prove(prefill, decode, facts, time.time())
            except CannotStart as error:
                if partner is None or await partner.answers():
                    raise
                self._mark_dead(partner, one_line(error))

    def _partner_of(self, engine: EngineIncarnation) -> EngineIncarnation | None:
        """Return the engine to test a handoff with, of the same number if possible; None if there is no such engine."""
        assert engine.descriptor is not None, "it is proven once it has loaded"
        wanted = EngineRole.DECODE if engine.role is EngineRole.PREFILL else EngineRole.PREFILL
        partners = [
            other
            for other in self
            if other.role is wanted
            and other.descriptor is not None
            and other.state is not EngineState.DEAD
            and find_refusal(other.descriptor, engine.descriptor) is None
        ]
        if engine.role in (EngineRole.BOTH, EngineRole.ENCODE) or not partners:
            return None
        return partners[engine.slot.number % len(partners)]

    async def _admit(self, engine: EngineIncarnation) -> None:
        assert engine.descriptor is not None
        engine.state = EngineState.READY
        self.switch_clock.note_start(engine.age_s)
        self._journal.add(f"let {engine.engine_id}, incarnation {engine.incarnation} serve: its canary was right")
        self._watches.start(self._keep_looking(engine))
        await self.publish(self.membership.with_model(self._served_model(engine)).with_engine(engine.descriptor))
        self._on_change()

    def _served_model(self, engine: EngineIncarnation) -> ServedModel:
        version = engine.model_version
        return ServedModel(version, self._models.directories[version], self.facts(version))

    async def catch_up_with(self, version: int) -> None:
        """Publish a newer membership if an ingress has a newer version, which an earlier controller did not save."""
        if version > self.membership.version:
            await self.publish(replace(self.membership, version=version + 1))

    async def publish(self, membership: Membership) -> None:
        """Set the membership, save it, and send it to the ingresses."""
        self.membership = membership
        await self._save()
        await self._ingresses.publish(membership)

    def facts(self, model_version: int) -> ModelFacts:
        """Return the facts of a model version; max_model_len is at most what every engine's KV cache can hold."""
        facts = [e.ready.facts for e in self if e.ready is not None and e.model_version == model_version]
        longest = min(min(f.max_model_len, f.layout.max_num_tokens) for f in facts)
        return replace(facts[0], max_model_len=longest)

    # -- health --------------------------------------------------------------------------------------------------

    async def _keep_looking(self, engine: EngineIncarnation) -> None:
        try:
            await self._look_until_gone(engine)
        except Exception as error:
            # Only a bug in raypd leads here. An engine that nobody watches is worse than one that is restarted.
            logger.exception("an engine could not be watched", extra={"engine_id": engine.engine_id})
            self._mark_dead(engine, f"it could not be watched: {one_line(error)}")

    async def _look_until_gone(self, engine: EngineIncarnation) -> None:
        num_idle_looks = 0
        while engine.state in _WATCHED:
            fault = await engine.look(self._head)
            if engine.state not in _WATCHED:
                return
            if fault is not None:
                self._mark_dead(engine, fault)
            elif engine.state is EngineState.READY and engine.is_asked_to_end:
                await self.drain(engine, "its process was asked to end")
            elif engine.drain_until_s is not None:
                is_late = asyncio.get_running_loop().time() >= engine.drain_until_s
                num_idle_looks = num_idle_looks + 1 if engine.is_idle else 0
                if num_idle_looks == _NUM_IDLE_LOOKS or is_late:
                    self.switch_clock.note_drain(engine.drained_s)
                    engine.state = EngineState.DRAINED
                    self._on_change()

    # -- from one controller to the next -------------------------------------------------------------------------

    def saved(self) -> tuple[SavedEngine, ...]:
        """Return what a later controller has to know of each engine."""
        return tuple(engine.saved() for engine in self)

    async def restore(
        self,
        saved: Iterable[SavedEngine],
        histories: Mapping[Slot, SlotHistory],
        roles: Mapping[Slot, EngineRole],
        membership: Membership,
    ) -> None:
        """Take over the engines of an earlier controller that still run, with their histories, roles and membership."""
        self.histories, self.roles, self.membership = dict(histories), dict(roles), membership
        for one in saved:
            config = self._models.config(one.model_version)
            engine = EngineIncarnation(
                config, one.slot, one.incarnation, one.role, one.model_version, self._trust, key_orders=self._key_orders
            )
            if one.ready is not None:
                self._key_orders.keep(str(one.ready.facts.layout.key_order))
            if one.state not in {EngineState.STARTING, EngineState.PENDING, *_WATCHED} or not await engine.find(one):
                self.membership = self.membership.without_engine(*engine.key)
                continue
            self._engines[one.slot] = engine
            self._journal.add(f"go on with {engine.engine_id}, incarnation {engine.incarnation}: it was {one.state}")
            if one.state is EngineState.DRAINING:
                engine.limit_drain()
            if one.state in _WATCHED:
                self._watches.start(self._keep_looking(engine))
            else:
                engine.state = EngineState.STARTING
                engine.task = asyncio.create_task(self._bring_in(engine, engine.wait_loaded(self.progress.say)))

    async def stop(self) -> None:
        """End all engines, and release their resources."""
        for task in self._watches:
            task.cancel()
        engines, self._engines = list(self), {}
        for engine in engines:
            if engine.task is not None:
                engine.task.cancel()
        await asyncio.gather(*(_end(engine) for engine in engines), *self._endings)


async def _end(engine: EngineIncarnation) -> None:
    if engine.state in {EngineState.DRAINED, *_WATCHED}:
        await engine.stop()
    await engine.kill()


def _pair(engine: EngineIncarnation, partner: EngineIncarnation | None) -> Pair:
    assert engine.descriptor is not None
    if partner is None:
        return None, engine.descriptor
    assert partner.descriptor is not None
    is_prefill = engine.role is EngineRole.PREFILL
    return (engine.descriptor, partner.descriptor) if is_prefill else (partner.descriptor, engine.descriptor)
