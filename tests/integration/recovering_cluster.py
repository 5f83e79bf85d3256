"""Engines and an ingress in one process, without Ray, whose engines die at chosen moments.

An engine dies as a process would: its sessions break, its links break, nobody hears another word of it. What it had
said by then is known to the test: a tap on the ingress's sessions lets through so many positions of each request and
keeps the rest, and a barrier holds an engine's step until it is dead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from actors.config import EngineConfig
from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import EngineCoreRequest
from actors.engine_server import EngineServer
from actors.executor import Executor, RunningStep
from cluster.errors import EngineLost
from cluster.images.image_support import open_prompt_images
from cluster.parameters.generation import GenerateChunk, GenerateRequest
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EnginePool, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from cluster.settings.images import ImageConfig
from cluster.settings.ingress import IngressConfig
from cluster.text.adapters import AdapterDirectory
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from tests.integration.idle_engines import until_all_idle
from tests.trusted import TRUST, member

_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class Tap:
    """Lets outputs of some engines through only below a position; those requests then wait until the engine is lost.

    has_stopped: as many requests as were to be stopped wait
    deaths:      of engines, by id
    """

    engine_ids: frozenset[str] = frozenset()
    position: int = 0
    num_requests: int = 0
    has_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    _num_stopped: int = 0

    def close(self, engine_ids: Iterable[str], position: int, num_requests: int) -> None:
        """Stop so many requests, from now on, on these engines, at this position of their output."""
        self.engine_ids, self.position, self.num_requests = frozenset(engine_ids), position, num_requests
        self.has_stopped, self._num_stopped = asyncio.Event(), 0

    def stops(self, engine_id: str, output: EngineCoreOutput) -> bool:
        """Whether the request goes no further on this engine."""
        if engine_id not in self.engine_ids or output.first_position + len(output.new_token_ids) <= self.position:
            return False
        self._num_stopped += 1
        if self._num_stopped == self.num_requests:
            self.has_stopped.set()
        return True


@dataclass(slots=True)
class _TappedOutputs:
    """The outputs of an engine that a request's client gets."""

    engine_id: str
    outputs: AsyncIterator[EngineCoreOutput]
    tap: Tap

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        output = await anext(self.outputs)
        if not self.tap.stops(self.engine_id, output):
            return output
        async for _ in self.outputs:
            pass  # Until the session breaks, which raises.
        await self.tap.deaths[self.engine_id].wait()
        raise EngineLost(self.engine_id, "it died with its last words unsent")


@dataclass(slots=True)
class _TappedConnection:
    """An EngineConnection with a tap."""

    inner: EngineConnection
    tap: Tap

    @property
    def descriptor(self) -> EngineDescriptor:
        return self.inner.descriptor

    @property
    def num_unfinished_requests(self) -> int:
        return self.inner.num_unfinished_requests

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        return _TappedOutputs(self.descriptor.engine_id, self.inner.submit(request), self.tap)

    def abort(self, request_id: str) -> None:
        self.inner.abort(request_id)


@dataclass(slots=True)
class _TappedPool:
    """An EnginePool with a tap."""

    inner: SessionPool
    tap: Tap

    def snapshot(self) -> Sequence[EngineConnection]:
        return [_TappedConnection(connection, self.tap) for connection in self.inner.snapshot()]

    def next_change(self) -> asyncio.Event:
        return self.inner.next_change()


class StepBarrier:
    """An Executor that holds one of the engine's steps, the n-th that computes tokens from when it was closed.

    poison: a token that no step survives with which a request begins
    pause_s: how much longer each step takes
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.facts = executor.facts
        self.shutdown = executor.shutdown
        self.encode = executor.encode
        self.take_other_pages = executor.take_other_pages
        self.is_reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()
        self._num_left = 0
        self.poison: int | None = None
        self.pause_s = 0.0

    def close(self, num_steps: int) -> None:
        """Let so many more steps through, and hold the next one."""
        self._opened.clear()
        self.is_reached.clear()
        self._num_left = num_steps + 1

    def open(self) -> None:
        """Let the engine go on."""
        self._opened.set()

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        if any(self.poison in request.prompt_token_ids for request in scheduler_output.scheduled_new_reqs):
            raise RuntimeError("poisoned")
        if scheduler_output.total_num_scheduled_tokens and self._num_left:
            self._num_left -= 1
            if not self._num_left:
                self._loop.call_soon_threadsafe(self.is_reached.set)
                self._opened.wait(_TIMEOUT_S)
        time.sleep(self.pause_s)
        return self._executor.start(scheduler_output)


class RecoveringCluster:
    """serving takes the requests. Engines are members only once they have joined."""

    def __init__(self, config: EngineConfig, policy: RecoveryPolicy) -> None:
        self._config = config
        self._membership = Membership(0, ())
        self._descriptors: dict[str, EngineDescriptor] = {}
        self._policy = policy
        self.engines: dict[str, EngineServer] = {}
        self.barriers: dict[str, StepBarrier] = {}
        self.tap = Tap()
        self.pool = SessionPool(member(), timeout_s=10.0)
        self.serving: Serving

    async def start(self, engine_ids: Iterable[str]) -> None:
        """Start engines; "prefill-0" is one for prefill."""
        await asyncio.gather(*(self._start(engine_id) for engine_id in engine_ids))
        facts = next(iter(self.engines.values())).facts
        description = ModelDescription.of("test", facts)
        tokenizer = ModelTokenizer.from_directory(Path(self._config.model.model), use_fastokens=True)
        adapters = AdapterDirectory(self._config.lora)
        images = open_prompt_images(Path(self._config.model.model), ImageConfig())
        self._input_processor = InputProcessor(description, tokenizer, adapters=adapters, images=images)
        self.serving = self._make_serving(_TappedPool(self.pool, self.tap))

    def _make_serving(self, engines: EnginePool) -> Serving:
        versions = ModelVersions(ModelVersion(1, self._input_processor, LeastLoadedPair()))
        settings = IngressConfig(
            max_attempts=self._policy.max_attempts, recovery_timeout_s=self._policy.engine_timeout_s
        )
        return Serving(versions, engines, settings)

    @asynccontextmanager
    async def another_serving(self) -> AsyncIterator[Serving]:
        """One with sessions of its own, with the engines that are members now, and without a tap."""
        pool = SessionPool(member(), timeout_s=10.0)
        await pool.update(self._membership)
        try:
            yield self._make_serving(pool)
        finally:
            await pool.close()

    async def _start(self, engine_id: str) -> None:
        engine = self.engines[engine_id] = EngineServer(self._config, engine_id, 1, TRUST)
        address = await engine.start("127.0.0.1")
        role = EngineRole(engine_id.partition("-")[0])
        self._descriptors[engine_id] = EngineDescriptor(engine_id, 1, role, address)
        core = engine._core
        assert core is not None
        core.executor = self.barriers[engine_id] = StepBarrier(core.executor)

    async def join(self, *engine_ids: str) -> None:
        """Let engines have requests."""
        for engine_id in engine_ids:
            self._membership = self._membership.with_engine(self._descriptors[engine_id])
        await self.pool.update(self._membership)

    async def change_role(self, engine_id: str, role: EngineRole) -> None:
        """Give an engine that has joined another role, as the controller does."""
        await self.engines[engine_id].set_role(role.value)
        self._membership = self._membership.with_role(engine_id, 1, role)
        await self.pool.update(self._membership)

    def port_of(self, engine_id: str) -> int:
        """Return the port at which an engine listens."""
        return int(self._descriptors[engine_id].address.rpartition(":")[2])

    def reach_through(self, engine_id: str, address: str) -> None:
        """Let everybody reach an engine at this address, from when it joins."""
        self._descriptors[engine_id] = replace(self._descriptors[engine_id], address=address)

    async def kill(self, engine_id: str) -> None:
        """Let an engine die; a little later its name is taken out of the membership."""
        session = self.pool._sessions[engine_id, 1]
        dying = asyncio.create_task(self.engines.pop(engine_id).stop())
        await asyncio.wait_for(session.wait_lost(), _TIMEOUT_S)
        self.tap.deaths[engine_id].set()
        self.barriers[engine_id].open()
        await dying
        self._membership = self._membership.without_engine(engine_id, 1)
        await self.pool.update(self._membership)

    async def cut_off(self, engine_id: str, cut: Callable[[], None]) -> None:
        """Cut the connections of an engine that lives on."""
        session = self.pool._sessions[engine_id, 1]
        cut()
        await asyncio.wait_for(session.wait_lost(), _TIMEOUT_S)
        self.tap.deaths[engine_id].set()

    async def close(self) -> None:
        """End everything."""
        for barrier in self.barriers.values():
            barrier.open()
        self._input_processor.close()
        await self.pool.close()
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    async def until_idle(self) -> None:
        """Wait until every engine has all its blocks back; then its invariants hold."""
        await until_all_idle(self.engines.values())


@asynccontextmanager
async def recovering_cluster(
    config: EngineConfig, engine_ids: Iterable[str], policy: RecoveryPolicy | None = None
) -> AsyncIterator[RecoveringCluster]:
    """Engines of one configuration, started, none of them a member yet."""
    cluster = RecoveringCluster(config, policy or RecoveryPolicy(max_attempts=4, engine_timeout_s=_TIMEOUT_S))
    try:
        await cluster.start(engine_ids)
        yield cluster
    finally:
        await cluster.close()


async def collect(serving: Serving, request: GenerateRequest) -> list[GenerateChunk]:
    """Every chunk of an answer."""
    async with asyncio.timeout(_TIMEOUT_S), aclosing(serving.generate(request)) as chunks:
        return [chunk async for chunk in chunks]
