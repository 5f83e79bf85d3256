"""The controller: reconciles the engines that are wanted with those that are there.

The decisions are pure (reconciler.py, membership.py); this is the thin part that talks to Ray. A round looks at every
engine, asks the reconciler what to do and starts doing it; starting an engine takes many rounds, so it runs as a task
of its own. An engine enters the membership once a canary request has proven it, and leaves it when it is drained or
dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.config import ModelFacts
from cluster.config import ClusterConfig
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import CannotPlace, CannotStart, UnknownEngine
from cluster.ingress_actor import IngressActor
from cluster.pool.engine_life import EngineLife
from cluster.pool.membership import Membership
from cluster.pool.placement import alive_nodes, choose_node
from cluster.pool.progress import ProgressLog
from cluster.pool.ray_calls import one_line, remote_class, within
from cluster.pool.reconciler import (
    DrainEngine,
    EngineState,
    ObservedEngine,
    RemoveEngine,
    RestartPolicy,
    Slot,
    SlotHistory,
    StartEngine,
    reconcile,
    scaled_slots,
    wanted_slots,
)
from cluster.status import ControllerView, Decision, EngineView

logger = logging.getLogger(__name__)

CONTROLLER_NAME: Final = "raypd-controller"
_PLACE_TIMEOUT_S: Final = 60.0
_PUBLISH_TIMEOUT_S: Final = 30.0
_MAX_DECISIONS: Final = 200


class Controller:
    """The actor that owns a cluster's engines and its ingress."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._wanted = wanted_slots({role: config.group(role).count for role in EngineRole})
        self._policy = RestartPolicy()
        self._engines: dict[Slot, EngineLife] = {}
        self._histories: dict[Slot, SlotHistory] = {}
        self._roles: dict[Slot, EngineRole] = {}
        """Of slots whose engines serve in another role than the one that they began in."""
        self._decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)
        self._membership = Membership(0, ())
        self._progress = ProgressLog()
        self._ingress: Any = None  # Ray's handle: its methods come into being at run time.
        self._ingress_address = ""
        self._is_stopping = asyncio.Event()
        self._has_news = asyncio.Event()
        self._reconciling: asyncio.Task[None] | None = None

    # -- from the start to the end -------------------------------------------------------------------------------

    async def start(self) -> str:
        """Start everything; returns the ingress's address once what has room is proven. Raises CannotStart.

        Engines that have no room in the Ray cluster are waited for, unless the others can serve without them.
        """
        ingress = remote_class(IngressActor).options(num_cpus=0, max_concurrency=10_000)
        self._ingress = ingress.remote(self._config, CONTROLLER_NAME)
        await self._act()
        async with asyncio.timeout(self._config.start_timeout_s):
            await self._wait_for_first_engines()
        await self._open_for_business()
        for engine in self._engines.values():
            if engine.state is EngineState.PENDING:
                assert engine.task is not None
                engine.task = asyncio.create_task(self._bring_in(engine, engine.task))
        self._reconciling = asyncio.create_task(self._reconcile_until_stopped())
        return self._ingress_address

    async def _wait_for_first_engines(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + min(_PLACE_TIMEOUT_S, self._config.start_timeout_s / 2)
        while starting := [engine for engine in self._engines.values() if engine.task and not engine.task.done()]:
            await asyncio.wait([e.task for e in starting if e.task], timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for engine in self._engines.values():
                if engine.task is not None and engine.task.done():
                    engine.task.result()
            if loop.time() >= give_up_s and all(engine.state is EngineState.PENDING for engine in starting):
                break
        roles = {engine.role for engine in self._engines.values() if engine.descriptor is not None}
        if EngineRole.BOTH not in roles and not {EngineRole.PREFILL, EngineRole.DECODE} <= roles:
            pending = [e for e in self._engines.values() if e.state is EngineState.PENDING]
            reasons = "; ".join(f"{engine.engine_id}: {engine.missing()}" for engine in pending)
            raise CannotPlace(f"no room for {len(pending)} of {len(self._engines)} engines: {reasons}")

    async def _open_for_business(self) -> None:
        """Prove every engine that is up in at least one pair, then let all of them serve at once."""
        up = [engine for engine in self._engines.values() if engine.descriptor is not None]
        pairs = {pair for engine in up for pair in self._pairs_of(engine)}
        await self._prove(sorted(pairs, key=str))
        port: int = await self._ingress.start.remote(self._facts())
        self._ingress_address = f"{self._config.ingress.host}:{port}"
        for engine in up:
            await self._admit(engine)

    async def stop(self) -> None:
        """Drain the ingress, stop the engines, give the resources back."""
        self._is_stopping.set()
        self._has_news.set()
        if self._reconciling is not None:
            await self._reconciling
        if self._ingress is not None:
            await within(self._ingress.drain.remote(self._config.drain_timeout_s), self._config.drain_timeout_s + 10)
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        for engine in self._engines.values():
            engine.kill()
        if self._ingress is not None:
            ray.kill(self._ingress)

    # -- what operators ask for ----------------------------------------------------------------------------------

    async def progress(self, after: int) -> list[str]:
        """What happened after the first so many events of the start; waits for more for a while."""
        return await self._progress.after(after)

    async def status(self) -> ControllerView:
        """Every engine as of its last health check, every slot in quarantine, and what was decided lately."""
        now_s = asyncio.get_running_loop().time()
        engines = [engine.view(self._history(engine.slot).last_error) for engine in self._engines.values()]
        for slot in self._wanted:
            history = self._history(slot)
            if slot not in self._engines:
                state = "quarantined" if history.is_quarantined(now_s, self._policy) else "waiting"
                incarnation = history.last_incarnation
                engines.append(EngineView(slot.engine_id, incarnation, slot.role.value, state, "", history.last_error))
        return ControllerView(tuple(engines), tuple(self._decisions))

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        """Want so many engines of these roles from now on; returns the ids of all that are wanted then."""
        self._wanted = scaled_slots(self._wanted, counts)
        wish = ", ".join(f"{count} {role.value}" for role, count in counts.items())
        self._decide(f"scale to {wish}: asked for")
        self._has_news.set()
        return [slot.engine_id for slot in self._wanted]

    async def drain(self, engine_id: str, *, for_good: bool = False) -> None:
        """Take an engine out of service once its work is done. A new life replaces it, unless it goes for good.

        Raises UnknownEngine if no engine of that name serves.
        """
        engine = self._serving_engine(engine_id)
        if for_good:
            self._wanted = [slot for slot in self._wanted if slot != engine.slot]
        await self._drain(engine, "asked for")
        self._has_news.set()

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Let an engine serve in another role from now on; what it has begun it ends. Raises UnknownEngine."""
        engine = self._serving_engine(engine_id)
        assert engine.descriptor is not None
        self._roles[engine.slot] = engine.role = role
        engine.descriptor = replace(engine.descriptor, role=role)
        self._decide(f"let {engine_id} serve as {role.value}: asked for")
        await self._publish(self._membership.with_role(engine_id, engine.incarnation, role))

    def _serving_engine(self, engine_id: str) -> EngineLife:
        for engine in self._engines.values():
            if engine.engine_id == engine_id and engine.state is EngineState.READY:
                return engine
        serving = sorted(e.engine_id for e in self._engines.values() if e.state is EngineState.READY)
        raise UnknownEngine(engine_id, serving)

    # -- rounds --------------------------------------------------------------------------------------------------

    async def _reconcile_until_stopped(self) -> None:
        while not self._is_stopping.is_set():
            await asyncio.gather(*(self._look_at(engine) for engine in self._engines.values()))
            await self._act()
            try:
                async with asyncio.timeout(self._config.heartbeat_interval_s):
                    await self._has_news.wait()
            except TimeoutError:
                continue
            self._has_news.clear()

    async def _look_at(self, engine: EngineLife) -> None:
        if engine.state not in {EngineState.READY, EngineState.DRAINING}:
            return
        fault = await engine.find_fault(self._config.heartbeat_timeout_s)
        if fault is not None:
            self._mark_dead(engine, fault)
        elif engine.drain_until_s is not None:
            is_late = asyncio.get_running_loop().time() >= engine.drain_until_s
            if engine.is_idle or is_late:
                engine.state = EngineState.DRAINED

    async def _act(self) -> None:
        observed = [ObservedEngine(e.slot, e.incarnation, e.state) for e in self._engines.values()]
        now_s = asyncio.get_running_loop().time()
        for action in reconcile(self._wanted, observed, self._histories, self._policy, now_s):
            match action:
                case StartEngine():
                    self._begin(action)
                case DrainEngine(slot):
                    await self._drain(self._engines[slot], action.reason)
                case RemoveEngine():
                    await self._remove(action)

    def _begin(self, action: StartEngine) -> None:
        slot, incarnation = action.slot, action.incarnation
        role = self._roles.get(slot, slot.role)
        engine = self._engines[slot] = EngineLife(self._config, slot, incarnation, role)
        self._histories.setdefault(slot, SlotHistory()).last_incarnation = incarnation
        self._decide(f"start {slot.engine_id}, incarnation {incarnation}: {action.reason}")
        nodes: dict[str, list[EngineRole]] = {}
        for other in self._engines.values():
            nodes.setdefault(other.node_id, []).append(other.role)
        bring_up = asyncio.create_task(engine.bring_up(choose_node(role, alive_nodes(), nodes), self._progress.say))
        is_first = self._reconciling is None
        engine.task = bring_up if is_first else asyncio.create_task(self._bring_in(engine, bring_up))

    async def _bring_in(self, engine: EngineLife, bring_up: asyncio.Task[None]) -> None:
        """Wait for an engine, prove it, then let it serve; if it fails, its slot is tried again, later each time."""
        try:
            await bring_up
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._prove(self._pairs_of(engine))
            await self._admit(engine)
        except (CannotStart, RayActorError, RayTaskError, TimeoutError) as error:
            self._mark_dead(engine, one_line(error))
        finally:
            bring_up.cancel()

    def _mark_dead(self, engine: EngineLife, error: str) -> None:
        logger.error("an engine died", extra={"engine_id": engine.engine_id, "error": error})
        engine.state = EngineState.DEAD
        history, now_s = self._history(engine.slot), asyncio.get_running_loop().time()
        history.add_death(now_s, error)
        self._decide(f"give up {engine.engine_id}, incarnation {engine.incarnation}: {error}")
        if history.is_quarantined(now_s, self._policy):
            self._decide(f"quarantine {engine.engine_id}: it died {len(history.deaths_s)} times, last of: {error}")
        self._has_news.set()

    async def _drain(self, engine: EngineLife, reason: str) -> None:
        engine.state = EngineState.DRAINING
        engine.drain_until_s = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        self._decide(f"drain {engine.engine_id}, incarnation {engine.incarnation}: {reason}")
        await self._publish(self._membership.with_draining(engine.engine_id, engine.incarnation))

    async def _remove(self, action: RemoveEngine) -> None:
        engine = self._engines.pop(action.slot)
        self._decide(f"remove {engine.engine_id}, incarnation {engine.incarnation}: {action.reason}")
        await self._publish(self._membership.without_engine(engine.engine_id, engine.incarnation))
        if engine.state is EngineState.DRAINED:
            await engine.stop()
        engine.kill()

    # -- who serves ----------------------------------------------------------------------------------------------

    async def _prove(self, pairs: list[tuple[EngineDescriptor | None, EngineDescriptor]]) -> None:
        facts = self._facts()
        for prefill, decode in pairs:
            names = decode.engine_id if prefill is None else f"{prefill.engine_id} -> {decode.engine_id}"
            self._progress.say(f"{names}: canary request")
            try:
                await self._ingress.prove.remote(prefill, decode, facts)
            except RayTaskError as error:
                raise CannotStart(one_line(error)) from error

    def _pairs_of(self, engine: EngineLife) -> list[tuple[EngineDescriptor | None, EngineDescriptor]]:
        """A pair that proves this engine: with the partner of the same number, going round; alone if it has none."""
        assert engine.descriptor is not None
        is_prefill = engine.role is EngineRole.PREFILL
        wanted = EngineRole.DECODE if is_prefill else EngineRole.PREFILL
        partners = [e.descriptor for e in self._engines.values() if e.role is wanted and e.descriptor is not None]
        if engine.role is EngineRole.BOTH or not partners:
            return [(None, engine.descriptor)]
        partner = partners[engine.slot.number % len(partners)]
        return [(engine.descriptor, partner) if is_prefill else (partner, engine.descriptor)]

    async def _admit(self, engine: EngineLife) -> None:
        assert engine.descriptor is not None
        engine.state = EngineState.READY
        self._decide(f"let {engine.engine_id}, incarnation {engine.incarnation} serve: its canary was right")
        await self._publish(self._membership.with_engine(engine.descriptor))

    async def _publish(self, membership: Membership) -> None:
        self._membership = membership
        if self._ingress is not None:
            await within(self._ingress.update_membership.remote(membership), _PUBLISH_TIMEOUT_S)

    def _facts(self) -> ModelFacts:
        """The model's facts; the longest request is one that every engine's KV cache can hold."""
        facts = [engine.ready.facts for engine in self._engines.values() if engine.ready is not None]
        longest = min(min(f.max_model_len, f.layout.num_blocks * f.layout.block_size) for f in facts)
        return replace(facts[0], max_model_len=longest)

    def _history(self, slot: Slot) -> SlotHistory:
        return self._histories.get(slot, SlotHistory())

    def _decide(self, text: str) -> None:
        logger.info("decided", extra={"decision": text})
        self._decisions.append(Decision(time.time(), text))
