"""A client that leaves frees both engines within one step, wherever the request is. The test steps the engines."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest, RequestStatus
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from cluster.client import GenerateClient
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.sessions.request_stream import RequestStream
from cluster.settings.ingress import IngressConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from kv_transfer.config import KVTransferConfig
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from tests.cluster.serving_setup import make_ingress_server
from tests.fakes import FakePool
from tests.faults.live_engines import small_engine
from tests.kv_transfer.swallowing_proxy import SwallowingProxy
from tests.reference import random_prompt
from tests.trusted import TRUST

_TIMEOUT_S = 60.0
_NUM_CHUNKS = 6
_CHUNK_TOKENS = 16


class Phase(enum.IntEnum):
    """How far a request has come."""

    QUEUE = enum.auto()
    RESERVED = enum.auto()
    PREFILL = enum.auto()
    TRANSFER = enum.auto()
    DECODE = enum.auto()

    @property
    def has_transfer(self) -> bool:
        """Whether a link may use its blocks."""
        return self in (Phase.RESERVED, Phase.PREFILL, Phase.TRANSFER)


class SteppedEngine:
    """An EngineConnection right to an engine core."""

    def __init__(self, role: EngineRole, core: EngineCore) -> None:
        self._descriptor = EngineDescriptor(f"{role}-0", 1, role, f"{role}-0")
        self._streams: dict[str, RequestStream] = {}
        self.core = core

    @property
    def descriptor(self) -> EngineDescriptor:
        return self._descriptor

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        stream = self._streams[request.request_id] = RequestStream(request)
        self.core.submit(request)
        return stream

    def abort(self, request_id: str) -> None:
        if (stream := self._streams.pop(request_id, None)) is not None:
            stream.end()
            self.core.abort(request_id)

    def step(self) -> None:
        for batch in self.core.step().outputs.values():
            for output in batch.outputs:
                if (stream := self._streams.get(output.request_id)) is not None:
                    stream.put(output)
                    if output.finished:
                        del self._streams[output.request_id]
        self.core.scheduler.check_integrity()

    @property
    def statuses(self) -> list[RequestStatus]:
        """The statuses of the requests that it has."""
        return [request.status for request in self.core.scheduler.requests.values()]

    @property
    def num_computing_steps(self) -> int:
        return self.core.make_stats().num_steps

    @property
    def num_blocks_in_use(self) -> int:
        stats = self.core.make_stats()
        return stats.num_blocks - stats.num_free_blocks


@dataclass(frozen=True, slots=True)
class Stage:
    """A cluster whose engines stand still."""

    prefill: SteppedEngine
    decode: SteppedEngine
    serving: Serving

    async def until(self, is_so: Callable[[], bool], *stepping: SteppedEngine) -> None:
        """Let Serving and links run, and these engines step, until something is so."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not is_so():
                for engine in stepping:
                    engine.step()
                await asyncio.sleep(0.001)

    async def reach(self, phase: Phase, first: asyncio.Future[object]) -> None:
        """Bring the one request there is to this phase. first: its client's first token."""
        prefill, decode = self.prefill, self.decode
        await self.until(lambda: bool(prefill.num_unfinished_requests and decode.num_unfinished_requests))
        if phase >= Phase.RESERVED:
            await self.until(lambda: decode.statuses == [RequestStatus.WAITING_FOR_REMOTE_KVS], decode)
        if phase >= Phase.PREFILL:
            await self.until(lambda: prefill.num_computing_steps == _NUM_CHUNKS // 2, prefill)
        if phase >= Phase.TRANSFER:
            await self.until(first.done, prefill)
        if phase >= Phase.DECODE:
            await self.until(lambda: decode.num_computing_steps == 3, decode, prefill)


@asynccontextmanager
async def _stage(directory: Path) -> AsyncIterator[Stage]:
    config = small_engine(directory, transfer=KVTransferConfig(transport="loopback"))
    hub, engines = LoopbackHub(), {}
    for role in (EngineRole.PREFILL, EngineRole.DECODE):
        address = EngineAddress(f"{role}-0", 1, f"{role}-0")
        core = build_engine_core(config, address, hub.control(address), lambda: None, trust=TRUST)
        engines[role] = SteppedEngine(role, core)
    facts = engines[EngineRole.DECODE].core.executor.facts
    processor = InputProcessor(
        ModelDescription.of("test", facts), ModelTokenizer.from_directory(directory, use_fastokens=True)
    )
    versions = ModelVersions(ModelVersion(1, processor, LeastLoadedPair()))
    serving = Serving(versions, FakePool(*engines.values()), IngressConfig())
    try:
        yield Stage(engines[EngineRole.PREFILL], engines[EngineRole.DECODE], serving)
    finally:
        for engine in engines.values():
            engine.core.shutdown()


@asynccontextmanager
async def _asked(stage: Stage) -> AsyncIterator[tuple[SwallowingProxy, asyncio.Future[object]]]:
    """A request to an ingress, from a client that can be cut off, and its answer's first response; then it leaves."""
    server = make_ingress_server(stage.serving)
    with SwallowingProxy(await server.start()) as proxy:
        async with GenerateClient(proxy.address) as client:
            prompt = random_prompt(_NUM_CHUNKS * _CHUNK_TOKENS)
            answer = client.generate(prompt, max_tokens=100, ignore_eos=True, resume=False)
            first: asyncio.Future[object] = asyncio.ensure_future(anext(answer))
            async with aclosing(answer):
                yield proxy, first
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await stage.until(lambda: not stage.serving.num_requests_in_flight)
    await server.drain(0)


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("is_dead", [False, True], ids=["cancels", "dies"])
async def test_a_client_that_leaves_gives_back_both_engines_within_one_step(
    checkpoint: Callable[[str], Path], phase: Phase, is_dead: bool
) -> None:
    async with _stage(checkpoint("llama")) as stage:
        engines = stage.prefill, stage.decode
        async with _asked(stage) as (proxy, first):
            await stage.reach(phase, first)
            num_steps = [engine.num_computing_steps for engine in engines]
            if is_dead:
                proxy.cut()
                await stage.until(lambda: not stage.serving.num_requests_in_flight)

        for engine in engines:
            engine.step()

        assert [engine.statuses for engine in engines] == [[], []]
        if not phase.has_transfer:
            assert [engine.num_blocks_in_use for engine in engines] == [0, 0]
        # A link may still use the others: they are free when it has said that it does not.
        await stage.until(lambda: not any(engine.num_blocks_in_use for engine in engines), *engines)
        assert [engine.num_computing_steps for engine in engines] == num_steps, "nobody has computed for it"
