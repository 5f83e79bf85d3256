"""Keeps an ingress's sessions with engines: one for each member of the newest membership.

A session that breaks although its engine is still a member is opened again, because the network, or the engine, may
only have been slow. Until then the engine gets no requests. An engine that has missed a heartbeat or two gets no new
requests as long as another engine of its kind answers. The requests that it has stay there until its session is lost:
another engine would have to compute their KV again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineKey, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session import EngineSession
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.trust.membership import Member

logger = logging.getLogger(__name__)

_REOPEN_DELAY_S: Final = 0.5
_NOTICED_SILENCE_S: Final = 1.0
"""The silence after which an engine gets no new requests; heartbeats come twice a second."""


class SessionPool:
    """An EnginePool that follows membership snapshots. Lives on one event loop."""

    def __init__(
        self,
        member: Member,
        timeout_s: float,
        load_book: LoadBook | None = None,
        indexes: PrefixIndexes | None = None,
    ) -> None:
        """Open no session yet: update() does.

        member:    the ingress's identity, which it proves to engines
        timeout_s: how long an engine may stay silent before its session is lost
        load_book: gets the engines' reports of their work; None: nobody reads them
        indexes:   the prefix indexes that engines' reports correct
        """
        self._load_book = load_book
        self._snapshot: list[EngineConnection] = []
        self._indexes = indexes or PrefixIndexes()
        self._member = member
        self._timeout_s = timeout_s
        self.refused_messages = RefusedMessages()
        """Counts the malformed messages of engines."""
        self._membership = Membership(0, ())
        self._sessions: dict[EngineKey, EngineSession] = {}
        self._keepers: dict[EngineKey, asyncio.Task[None]] = {}
        self._update_lock = asyncio.Lock()
        self._change = asyncio.Event()

    def snapshot(self) -> Sequence[EngineConnection]:
        """Return the engines that serve now: ready, not draining, not silent while another of their kind answers.

        As long as they stay the same engines in the same roles, the list that is returned is the same one.
        """
        draining = self._membership.draining
        serving = [session for key, session in self._sessions.items() if not session.is_lost and key not in draining]
        answering = {_kind(session) for session in serving if session.silence_s < _NOTICED_SILENCE_S}
        found = [s for s in serving if s.silence_s < _NOTICED_SILENCE_S or _kind(s) not in answering]
        if found != self._snapshot:
            self._snapshot = list(found)
        return self._snapshot

    def next_change(self) -> asyncio.Event:
        """Return an event that is set once engines have come, or were lost, after this call."""
        return self._change

    @property
    def membership(self) -> Membership:
        """The newest membership that update() was given."""
        return self._membership

    def stats(self) -> dict[EngineKey, tuple[SchedulerStats, float]]:
        """Return each engine's newest counters, by id and incarnation, and when they came, in monotonic seconds."""
        return {key: session.last_stats for key, session in self._sessions.items() if session.last_stats is not None}

    async def update(self, membership: Membership) -> None:
        """Open sessions with new members, and close the sessions with engines that left. Ignores an older snapshot."""
        async with self._update_lock:
            if membership.version <= self._membership.version:
                return
            previous, self._membership = self._membership, membership
            wanted = {engine.key: engine for engine in membership.engines}
            gone = [key for key in self._keepers if key not in wanted]
            await asyncio.gather(*(self._drop(key, has_left=key in previous.draining) for key in gone))
            for key, session in self._sessions.items():
                session.set_descriptor(wanted[key])
            self._snapshot = []  # Roles may have changed.
            if self._load_book is not None:
                self._load_book.keep(wanted)
            fresh = [engine for key, engine in wanted.items() if key not in self._keepers]
            await asyncio.gather(*(self._open(engine) for engine in fresh))
            for engine in fresh:
                self._keepers[engine.key] = asyncio.create_task(self._keep_open(engine.key))
            self._tell_of_change()

    async def close(self) -> None:
        """Close every session."""
        async with self._update_lock:
            await asyncio.gather(*(self._drop(key) for key in list(self._keepers)))

    async def _keep_open(self, key: EngineKey) -> None:
        """Open the session again whenever it breaks, as long as the engine is a member. Runs until it is cancelled."""
        while True:
            session = self._sessions.get(key)
            if session is not None:
                await session.wait_lost()
                self._tell_of_change()
                await session.close()
                self._sessions.pop(key, None)
            await asyncio.sleep(_REOPEN_DELAY_S)
            engine = next((e for e in self._membership.engines if e.key == key), None)
            if engine is not None and await self._open(engine):
                logger.info("the session with an engine is open again", extra={"engine_id": engine.engine_id})
                self._tell_of_change()

    async def _open(self, engine: EngineDescriptor) -> bool:
        blocks = self._indexes.follow(engine)
        session = EngineSession(
            engine, self._member, self._timeout_s, self.refused_messages, load_book=self._load_book, blocks=blocks
        )
        try:
            await session.open()
        except EngineLost as error:
            logger.warning("an engine could not be reached", extra={"reason": str(error)})
            return False
        except asyncio.CancelledError:
            await session.close()
            raise
        # The membership may have changed meanwhile, and update() knows open sessions only.
        newest = next((member for member in self._membership.engines if member.key == engine.key), engine)
        session.set_descriptor(newest)
        self._sessions[engine.key] = session
        return True

    async def _drop(self, key: EngineKey, *, has_left: bool = False) -> None:
        keeper = self._keepers.pop(key)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        session = self._sessions.pop(key, None)
        if session is not None:
            await session.close(has_left=has_left)
        self._indexes.forget_engine(key)

    def _tell_of_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _kind(session: EngineSession) -> tuple[EngineRole, int]:
    return session.descriptor.role, session.descriptor.model_version
