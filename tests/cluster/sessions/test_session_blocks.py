"""An ingress's index follows an engine's prefix cache over a session, through gaps and snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from actors.core.blocks.block_pool import BlockPool
from actors.core.blocks.kv_events import KVEventLog
from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.requests.request import EngineCoreRequest
from actors.sessions import session_server
from actors.sessions.block_messages import CachedBlocks, snapshot_message
from actors.sessions.session_server import SessionServer
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole
from cluster.routing.prefixes import engine_blocks
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from tests.cluster.routing.prefixes.test_prefix_index import hashes_of
from tests.trusted import TRUST, member

BLOCK_SIZE = 16
ENGINE: EngineKey = ("decode-0", 1)
_TIMEOUT_S = 60.0


class CachingEngine:
    """An engine of which only the prefix cache exists. It sends snapshots in parts of 100 block ids."""

    def __init__(self, num_blocks: int, num_state_blocks: int = 0) -> None:
        self.num_state_blocks = num_state_blocks
        self.log: KVEventLog | None = KVEventLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.server: SessionServer
        self.num_snapshots = 0

    def cache(self, prompt: int, num_blocks: int) -> None:
        """Compute a prompt and end it, which evicts the blocks that were used least recently."""
        hashes = hashes_of(prompt, num_blocks)
        hit = self.pool.find_longest_prefix(hashes, num_blocks)
        self.pool.touch(hit)
        blocks = [*hit, *self.pool.get_free_blocks(num_blocks - len(hit))]
        self.pool.cache_full_blocks(blocks[len(hit) :], hashes[len(hit) :], len(hit))
        self.pool.free(blocks)

    def report(self) -> None:
        if self.log is not None and (batch := self.log.take()) is not None:
            self.server.deliver_kv_events(batch)

    async def send_cached_blocks(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> int | None:
        if self.log is None:
            return None
        self.num_snapshots += begin == 0
        self.report()
        end = min(begin + 100, self.pool.num_blocks)
        cached = self.pool.cached_blocks(begin, end)
        deliver(snapshot_message(self.log.sequence, begin, self.pool.num_blocks, cached, end))
        return None if end == self.pool.num_blocks else end

    def stats_for(self, client_index: int) -> SchedulerStats:
        load = LoadReport(num_state_blocks=self.num_state_blocks)
        return SchedulerStats(num_blocks=self.pool.num_blocks, block_size=BLOCK_SIZE, load_report=load)

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        raise NotImplementedError

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        raise NotImplementedError

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        assert not requests


class Ingress:
    def __init__(self) -> None:
        self.indexes = PrefixIndexes()
        self.index = self.indexes.make(1, BLOCK_SIZE)
        self.pool = SessionPool(member(), _TIMEOUT_S, indexes=self.indexes)

    def num_found(self, prompt: int, num_blocks: int) -> int:
        return self.index.find(hashes_of(prompt, num_blocks)).get(ENGINE, 0)

    @property
    def num_gaps(self) -> int:
        [(_, counts)] = self.indexes.sizes().values()
        return counts.num_gaps

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while not is_true():  # noqa: ASYNC110  # another end of a connection
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(engine_blocks, "ASK_INTERVAL_S", 0.05)


@asynccontextmanager
async def following(engine: CachingEngine) -> AsyncIterator[Ingress]:
    grpc_server = grpc.aio.server()
    acceptor = GrpcAcceptor(TRUST)
    engine.server = SessionServer(engine, ENGINE[0], ENGINE[1], acceptor)
    grpc_server.add_generic_rpc_handlers((engine.server.handler(), acceptor.handler()))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    ingress = Ingress()
    try:
        descriptor = EngineDescriptor(*ENGINE, EngineRole.DECODE, f"127.0.0.1:{port}")
        await ingress.pool.update(Membership(0, ()).with_engine(descriptor))
        yield ingress
    finally:
        await ingress.pool.close()
        await grpc_server.stop(0)


async def test_what_an_engine_with_states_reports_need_not_begin_with_the_first_block() -> None:
    engine = CachingEngine(num_blocks=500, num_state_blocks=2)
    end = engine.pool.get_free_blocks(1)
    engine.pool.cache_full_blocks(end, hashes_of(0, 300)[299:], 299)
    async with following(engine) as ingress:
        await ingress.until(lambda: ingress.num_found(0, 300) == 300)
        assert ingress.num_found(0, 299) == 0


async def test_an_ingress_that_comes_later_knows_what_is_cached_and_follows_evictions() -> None:
    engine = CachingEngine(num_blocks=500)
    engine.cache(0, 300)
    engine.cache(1, 100)
    async with following(engine) as ingress:
        await ingress.until(lambda: ingress.num_found(1, 100) == 100)
        assert ingress.num_found(0, 300) == 300
        engine.cache(2, 200)
        engine.report()
        await ingress.until(lambda: ingress.num_found(2, 200) == 200)
        assert ingress.num_found(0, 300) == 200, "prompt 2 took the 100 empty blocks, and 100 of prompt 0"
        assert ingress.num_found(1, 100) == 100
        assert engine.num_snapshots == 1
        assert ingress.num_gaps == 0


async def test_what_the_router_has_sent_there_is_corrected() -> None:
    engine = CachingEngine(num_blocks=100)
    async with following(engine) as ingress:
        await ingress.until(lambda: engine.num_snapshots == 1)
        ingress.index.add([ENGINE], hashes_of(0, 80))
        engine.cache(0, 80)
        engine.cache(1, 80)
        engine.report()
        await ingress.until(lambda: ingress.num_found(1, 80) == 80)
        assert ingress.num_found(0, 80) == 20


async def test_events_that_were_dropped_are_repaired_by_a_snapshot() -> None:
    engine = CachingEngine(num_blocks=100)
    assert engine.log is not None
    engine.log.max_blocks = 150
    async with following(engine) as ingress:
        await ingress.until(lambda: engine.num_snapshots == 1)
        for prompt in range(10):
            engine.cache(prompt, 60)
        engine.report()
        await ingress.until(lambda: ingress.num_found(9, 60) == 60)
        assert ingress.num_found(8, 60) == 40
        assert engine.num_snapshots == 2
        assert ingress.num_gaps == 1


async def test_an_ingress_that_reads_too_slowly_misses_events_and_repairs_that() -> None:
    engine = CachingEngine(num_blocks=100)
    async with following(engine) as ingress:
        await ingress.until(lambda: engine.num_snapshots == 1)
        await ingress.until(lambda: ingress.indexes.sizes()[1][1].num_snapshots == 1)
        for number in range(500):
            engine.cache(number % 7, 30)
            engine.report()
        engine.cache(3, 30)
        engine.report()
        await ingress.until(lambda: ingress.num_gaps > 0)
        await ingress.until(lambda: ingress.num_found(3, 30) == 30)
        lengths = [len(engine.pool.find_longest_prefix(hashes_of(prompt, 30), 30)) for prompt in range(7)]
        await ingress.until(lambda: [ingress.num_found(prompt, 30) for prompt in range(7)] == lengths)


async def test_a_session_that_broke_begins_with_a_snapshot() -> None:
    engine = CachingEngine(num_blocks=100)
    async with following(engine) as ingress:
        engine.cache(0, 50)
        await ingress.until(lambda: ingress.num_found(0, 50) == 50)
        [session] = ingress.pool._sessions.values()
        await session.close()
        engine.cache(1, 90)
        engine.report()
        await ingress.until(lambda: ingress.num_found(1, 90) == 90)
        assert ingress.num_found(0, 50) == 10


async def test_an_engine_that_left_the_cluster_has_nothing() -> None:
    engine = CachingEngine(num_blocks=100)
    engine.cache(0, 50)
    async with following(engine) as ingress:
        await ingress.until(lambda: ingress.num_found(0, 50) == 50)
        await ingress.pool.update(Membership(9, ()))
        assert ingress.num_found(0, 50) == 0


async def test_an_engine_without_events_is_known_by_what_was_sent_there() -> None:
    engine = CachingEngine(num_blocks=100)
    engine.log = None
    async with following(engine) as ingress:
        ingress.index.add([ENGINE], hashes_of(0, 50))
        await ingress.until(lambda: bool(ingress.pool.stats()))
        assert ingress.num_found(0, 50) == 50
        assert ingress.indexes.sizes()[1][1].num_snapshots == 0
