"""The controller: reconciles the engines that are wanted with those that are there.

The decisions are pure (reconciler.py, membership.py); this is the thin part that talks to Ray. A round looks at every
engine, asks the reconciler what to do and starts doing it; starting an engine takes many rounds, so it runs as a task
of its own. An engine enters the membership once a canary request has proven it, and leaves it when it dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.config import ModelFacts
from actors.engine_actor import EngineActor, EngineHealth, EngineReady, RankResources
from cluster.config import ClusterConfig
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import CannotStart
from cluster.ingress_actor import IngressActor
from cluster.pool.membership import Membership
from cluster.pool.placement import Placement
from cluster.pool.progress import ProgressLog
from cluster.pool.reconciler import (
    EngineState,
    ObservedEngine,
    RemoveEngine,
    Slot,
    StartEngine,
    reconcile,
    wanted_slots,
)
from cluster.status import ControllerView, Decision, EngineView

logger = logging.getLogger(__name__)

_Actor = Any  # Ray's handle: its methods come into being at run time.

CONTROLLER_NAME = "raypd-controller"
_ROUND_S = 1.0
_HEALTH_TIMEOUT_S = 10.0
_MAX_BACKOFF_S = 60.0
_MAX_DECISIONS = 200


@dataclass(slots=True)
class _Engine:
    slot: Slot
    incarnation: int
    actor: _Actor
    state: EngineState = EngineState.STARTING
    descriptor: EngineDescriptor | None = None
    ready: EngineReady | None = None
    health: EngineHealth | None = None
    health_at_s: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Controller:
    """The actor that owns a cluster's engines and its ingress."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._slots = wanted_slots({role: config.group(role).count for role in EngineRole})
        self._placement = Placement(config, self._slots)
        self._engines: dict[Slot, _Engine] = {}
        self._incarnations: dict[Slot, int] = {}
        self._not_before_s: dict[Slot, float] = {}
        self._last_errors: dict[str, str] = {}
        self._decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)
        self._membership = Membership(0, ())
        self._progress = ProgressLog()
        self._ingress: _Actor = None
        self._ingress_address = ""
        self._is_stopping = asyncio.Event()
        self._reconciling: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start everything; returns the ingress's address once every engine is proven. Raises CannotStart."""
        self._progress.say("reserving resources")
        await self._placement.reserve(min(60.0, self._config.start_timeout_s))
        self._ingress = (
            _remote(IngressActor).options(num_cpus=0, max_concurrency=10_000).remote(self._config, CONTROLLER_NAME)
        )
        await self._round()
        async with asyncio.timeout(self._config.start_timeout_s):
            await asyncio.gather(*(engine.task for engine in self._engines.values() if engine.task is not None))
        await self._prove_all()
        self._reconciling = asyncio.create_task(self._reconcile_until_stopped())
        return self._ingress_address

    async def progress(self, after: int) -> list[str]:
        """What happened after the first so many events of the start; waits for more for a while."""
        return await self._progress.after(after)

    async def status(self) -> ControllerView:
        """Every engine as of its last health check, and what was decided lately."""
        engines = tuple(
            EngineView(
                engine_id=engine.slot.engine_id,
                incarnation=engine.incarnation,
                role=engine.slot.role.value,
                state=engine.state.value,
                address=engine.descriptor.address if engine.descriptor else "",
                last_error=self._last_errors.get(engine.slot.engine_id, ""),
                kv_transport=engine.ready.facts.kv_transport if engine.ready else "",
                stats=engine.health.stats if engine.health else None,
                stats_at_s=engine.health_at_s,
            )
            for engine in self._engines.values()
        )
        return ControllerView(engines, tuple(self._decisions))

    def _decide(self, text: str) -> None:
        self._decisions.append(Decision(time.time(), text))

    async def stop(self) -> None:
        """Drain the ingress, stop the engines, give the resources back."""
        self._is_stopping.set()
        if self._reconciling is not None:
            await self._reconciling
        if self._ingress is not None:
            await _in_time(self._ingress.drain.remote(self._config.drain_timeout_s), self._config.drain_timeout_s + 10)
        stops = [_in_time(engine.actor.stop.remote(), 30.0) for engine in self._engines.values()]
        await asyncio.gather(*stops)
        for engine in self._engines.values():
            if engine.task is not None:
                engine.task.cancel()
            ray.kill(engine.actor)
        if self._ingress is not None:
            ray.kill(self._ingress)
        self._placement.release()

    async def _reconcile_until_stopped(self) -> None:
        while not self._is_stopping.is_set():
            await self._round()
            try:
                await asyncio.wait_for(self._is_stopping.wait(), _ROUND_S)
            except TimeoutError:
                continue

    async def _round(self) -> None:
        await asyncio.gather(*(self._look_at(engine) for engine in self._engines.values()))
        observed = [ObservedEngine(e.slot, e.incarnation, e.state) for e in self._engines.values()]
        for action in reconcile(self._slots, observed, self._incarnations):
            if isinstance(action, RemoveEngine):
                await self._remove(action)
            elif asyncio.get_running_loop().time() >= self._not_before_s.get(action.slot, 0.0):
                self._begin(action)

    async def _look_at(self, engine: _Engine) -> None:
        """Dead is who cannot answer any more; who is slow to answer stays."""
        if engine.state is not EngineState.READY:
            return
        try:
            health: EngineHealth = await asyncio.wait_for(engine.actor.health.remote(), _HEALTH_TIMEOUT_S)
            engine.health, engine.health_at_s = health, time.time()
            error = health.error
        except TimeoutError:
            logger.warning("an engine is slow to answer", extra={"engine_id": engine.slot.engine_id})
            return
        except RayActorError as died:
            error = _one_line(died)
        if error is not None:
            self._mark_dead(engine, error)

    def _begin(self, action: StartEngine) -> None:
        slot, incarnation = action.slot, action.incarnation
        group = self._config.group(slot.role)
        resources = RankResources(
            self._placement.bundle_index(slot), group.num_cpus, group.num_gpus, dict(group.resources)
        )
        actor = (
            _remote(EngineActor, concurrency_groups={"control": 4})
            .options(
                num_cpus=group.num_cpus,
                num_gpus=group.num_gpus,
                resources=group.resources or None,
                scheduling_strategy=self._placement.strategy(slot),
            )
            .remote(self._config.engine_config(slot.role), slot.engine_id, incarnation, resources)
        )
        engine = self._engines[slot] = _Engine(slot, incarnation, actor)
        self._decide(f"start {slot.engine_id}, incarnation {incarnation}: its slot is empty")
        self._incarnations[slot] = incarnation
        is_first = self._reconciling is None
        engine.task = asyncio.create_task(self._bring_up(engine) if is_first else self._bring_back(engine))

    async def _bring_up(self, engine: _Engine) -> None:
        """Start the engine. Raises CannotStart: a cluster that cannot start says why."""
        name = engine.slot.engine_id
        self._progress.say(f"{name}: starting")
        watch = asyncio.create_task(self._report_progress(engine))
        try:
            engine.ready = await engine.actor.start.remote(self._config.engine_host)
        except (RayActorError, RayTaskError) as error:
            raise CannotStart(f"{name}: {_one_line(error)}") from error
        finally:
            watch.cancel()
        address = engine.ready.address
        further = engine.ready.facts.further_rank_addresses
        engine.descriptor = EngineDescriptor(name, engine.incarnation, engine.slot.role, address, further)
        self._progress.say(f"{name}: loaded, {engine.ready.facts.layout.num_blocks} KV blocks, at {address}")

    async def _bring_back(self, engine: _Engine) -> None:
        """Start a replacement: prove it, then let it serve; if it fails, its slot is tried again, later each time."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._bring_up(engine)
                await self._prove(self._pairs_of(engine))
            await self._admit(engine)
        except (CannotStart, RayActorError, RayTaskError, TimeoutError) as error:
            self._mark_dead(engine, _one_line(error))

    async def _report_progress(self, engine: _Engine) -> None:
        last = "starting"
        while True:
            await asyncio.sleep(_ROUND_S)
            now: str = await engine.actor.progress.remote()
            if now != last:
                self._progress.say(f"{engine.slot.engine_id}: {now}")
            last = now

    def _mark_dead(self, engine: _Engine, error: str) -> None:
        logger.error("an engine died", extra={"engine_id": engine.slot.engine_id, "error": error})
        engine.state = EngineState.DEAD
        self._decide(f"give up {engine.slot.engine_id}, incarnation {engine.incarnation}: {error}")
        self._last_errors[engine.slot.engine_id] = error
        backoff_s = min(_MAX_BACKOFF_S, 2.0 ** min(engine.incarnation - 1, 6))
        self._not_before_s[engine.slot] = asyncio.get_running_loop().time() + backoff_s

    async def _remove(self, action: RemoveEngine) -> None:
        engine = self._engines.pop(action.slot)
        self._decide(f"remove {action.slot.engine_id}, incarnation {action.incarnation}")
        await self._publish(self._membership.without_engine(engine.slot.engine_id, engine.incarnation))
        ray.kill(engine.actor)

    async def _prove_all(self) -> None:
        """At the start: every engine in at least one pair, then all of them serve at once."""
        pairs = {pair for engine in self._engines.values() for pair in self._pairs_of(engine)}
        await self._prove(sorted(pairs, key=str))
        assert self._ingress is not None
        facts = self._facts()
        port: int = await self._ingress.start.remote(facts)
        self._ingress_address = f"{self._config.ingress.host}:{port}"
        for engine in list(self._engines.values()):
            await self._admit(engine)

    async def _prove(self, pairs: list[tuple[EngineDescriptor | None, EngineDescriptor]]) -> None:
        assert self._ingress is not None
        facts = self._facts()
        for prefill, decode in pairs:
            names = decode.engine_id if prefill is None else f"{prefill.engine_id} -> {decode.engine_id}"
            self._progress.say(f"{names}: canary request")
            try:
                await self._ingress.prove.remote(prefill, decode, facts)
            except RayTaskError as error:
                raise CannotStart(_one_line(error)) from error

    def _pairs_of(self, engine: _Engine) -> list[tuple[EngineDescriptor | None, EngineDescriptor]]:
        """A pair that proves this engine: with the partner of the same number, going round."""
        assert engine.descriptor is not None
        if engine.slot.role is EngineRole.BOTH:
            return [(None, engine.descriptor)]
        is_prefill = engine.slot.role is EngineRole.PREFILL
        wanted = EngineRole.DECODE if is_prefill else EngineRole.PREFILL
        partners = [e.descriptor for e in self._engines.values() if e.slot.role is wanted and e.descriptor is not None]
        if not partners:
            return []
        partner = partners[engine.slot.number % len(partners)]
        return [(engine.descriptor, partner) if is_prefill else (partner, engine.descriptor)]

    async def _admit(self, engine: _Engine) -> None:
        assert engine.descriptor is not None
        engine.state = EngineState.READY
        self._decide(f"let {engine.slot.engine_id}, incarnation {engine.incarnation} serve: its canary was right")
        await self._publish(self._membership.with_engine(engine.descriptor))

    async def _publish(self, membership: Membership) -> None:
        self._membership = membership
        if self._ingress is not None:
            await _in_time(self._ingress.update_membership.remote(membership), 30.0)

    def _facts(self) -> ModelFacts:
        """The model's facts; the longest request is one that every engine's KV cache can hold."""
        facts = [engine.ready.facts for engine in self._engines.values() if engine.ready is not None]
        longest = min(min(f.max_model_len, f.layout.num_blocks * f.layout.block_size) for f in facts)
        return replace(facts[0], max_model_len=longest)


def _remote(cls: type, **options: Any) -> Any:  # a class that Ray makes at run time
    return ray.remote(**options)(cls) if options else ray.remote(cls)


async def _in_time(call: Coroutine[Any, Any, Any] | Any, timeout_s: float) -> None:
    """Await a call that may meet a dead or stuck actor; that is logged, not raised."""
    try:
        await asyncio.wait_for(call, timeout_s)
    except (RayActorError, RayTaskError, TimeoutError) as error:
        logger.warning("a call to an actor failed", extra={"error": _one_line(error)})


def _one_line(error: BaseException) -> str:
    """The cause in its own words, without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[-1] if isinstance(error, RayActorError) else text
