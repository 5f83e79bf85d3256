"""An engine's session has what the membership says of the engine, whenever it was opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.prefixes.engine_blocks import EngineBlocks
from cluster.sessions import session_pool
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.trust.membership import Member
from tests.trusted import member

ENGINE = EngineDescriptor("engine-0", 1, EngineRole.DECODE, "127.0.0.1:1")


class Network:
    """Lets sessions open, one after the other, when the test says so."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.is_opening = asyncio.Event()
        self.sessions: list[FakeSession] = []


class FakeSession:
    network: Network
    silence_s = 0.0
    last_stats = None

    def __init__(
        self,
        descriptor: EngineDescriptor,
        member: Member,
        timeout_s: float,
        refused_messages: RefusedMessages,
        *,
        load_book: LoadBook | None,
        blocks: EngineBlocks | None,
    ) -> None:
        del member, timeout_s, refused_messages, load_book, blocks
        self.descriptor = descriptor
        self._lost = asyncio.Event()

    async def open(self) -> None:
        self.network.is_opening.set()
        await self.network.may_open.wait()
        self.network.sessions.append(self)

    def set_descriptor(self, descriptor: EngineDescriptor) -> None:
        self.descriptor = descriptor

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def lose(self) -> None:
        self._lost.set()

    async def wait_lost(self) -> None:
        await self._lost.wait()

    async def close(self, *, has_left: bool = False) -> None:
        self._lost.set()


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(FakeSession, "network", network, raising=False)
    monkeypatch.setattr(session_pool, "EngineSession", FakeSession)
    monkeypatch.setattr(session_pool, "_REOPEN_DELAY_S", 0.0)
    return network


@pytest.fixture
async def pool(network: Network) -> AsyncIterator[SessionPool]:
    """With a session to the one engine."""
    pool = SessionPool(member(), timeout_s=60.0)
    await pool.update(Membership(1, (ENGINE,)))
    yield pool
    await pool.close()


async def reopening(network: Network) -> None:
    """The session breaks, and the next one is being opened."""
    network.may_open.clear()
    network.is_opening.clear()
    network.sessions[-1].lose()
    async with asyncio.timeout(60):
        await network.is_opening.wait()


async def test_a_role_switch_while_a_session_reopens_is_not_lost(network: Network, pool: SessionPool) -> None:
    await reopening(network)
    await pool.update(Membership(1, (ENGINE,)).with_role("engine-0", 1, EngineRole.PREFILL))
    change = pool.next_change()
    network.may_open.set()
    async with asyncio.timeout(60):
        await change.wait()
    assert [engine.descriptor.role for engine in pool.snapshot()] == [EngineRole.PREFILL]


async def test_the_snapshot_is_the_same_list_until_an_engine_or_a_role_changes(
    network: Network, pool: SessionPool
) -> None:
    before = pool.snapshot()
    assert pool.snapshot() is before
    await pool.update(Membership(1, (ENGINE,)).with_role("engine-0", 1, EngineRole.PREFILL))
    after = pool.snapshot()
    assert after == before
    assert after is not before
    network.sessions[-1].lose()
    assert pool.snapshot() == []


async def test_the_load_of_an_engine_that_has_left_is_forgotten(network: Network) -> None:
    book = LoadBook()
    pool = SessionPool(member(), timeout_s=60.0, load_book=book)
    await pool.update(Membership(1, (ENGINE,)))
    work = book.work_of(ENGINE)
    await pool.update(Membership(2, (ENGINE,)))
    assert book.work_of(ENGINE) is work
    await pool.update(Membership(3, ()))
    assert book.work_of(ENGINE) is not work
    await pool.close()


async def test_an_engine_that_leaves_while_its_session_reopens_is_gone(network: Network, pool: SessionPool) -> None:
    await reopening(network)
    await pool.update(Membership(2, ()))
    network.may_open.set()
    await pool.update(Membership(3, ()))
    assert pool.snapshot() == []


async def test_whatever_happens_while_sessions_open_the_newest_membership_holds(
    network: Network, pool: SessionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = Membership(1, (ENGINE,))
    roles = [EngineRole.PREFILL, EngineRole.BOTH, EngineRole.DECODE, EngineRole.PREFILL]
    for role in roles:
        await reopening(network)
        membership = membership.with_role("engine-0", 1, role)
        await pool.update(membership)
        num_open, change = len(network.sessions), pool.next_change()
        network.may_open.set()
        async with asyncio.timeout(60):
            await change.wait()
        assert len(network.sessions) == num_open + 1
        assert [engine.descriptor.role for engine in pool.snapshot()] == [role]


async def test_an_engine_that_cannot_be_reached_at_first_has_the_role_of_the_newest_membership(
    network: Network, pool: SessionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(session: FakeSession) -> None:
        raise EngineLost("engine-0", "refused")

    with monkeypatch.context() as patch:
        patch.setattr(FakeSession, "open", refuse)
        change = pool.next_change()
        network.sessions[-1].lose()
        await change.wait()
        await pool.update(Membership(1, (ENGINE,)).with_role("engine-0", 1, EngineRole.BOTH))
    num_open = len(network.sessions)
    async with asyncio.timeout(60):
        while len(network.sessions) == num_open:
            await pool.next_change().wait()
    assert [engine.descriptor.role for engine in pool.snapshot()] == [EngineRole.BOTH]
