"""The engines that an ingress can send to: one session for each member of the newest membership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from actors.core.stats import SchedulerStats
from cluster.engine_connection import EngineConnection
from cluster.errors import EngineLost
from cluster.pool.membership import Membership
from cluster.pool.session import EngineSession

logger = logging.getLogger(__name__)


class SessionPool:
    """An EnginePool that follows membership snapshots. Lives on one event loop."""

    def __init__(self) -> None:
        self._membership = Membership(0, ())
        self._sessions: dict[tuple[str, int], EngineSession] = {}
        self._update_lock = asyncio.Lock()
        self._change = asyncio.Event()

    def snapshot(self) -> Sequence[EngineConnection]:
        """The engines that serve now."""
        return [session for session in self._sessions.values() if not session.is_lost]

    def next_change(self) -> asyncio.Event:
        """An event that is set when engines have come since this call."""
        return self._change

    @property
    def membership(self) -> Membership:
        """The one that is in force."""
        return self._membership

    def stats(self) -> dict[tuple[str, int], tuple[SchedulerStats, float]]:
        """The newest counters of engines, by id and incarnation, with the Unix time at which they came."""
        return {key: session.last_stats for key, session in self._sessions.items() if session.last_stats is not None}

    async def update(self, membership: Membership) -> None:
        """Open sessions with new members, close those with engines that left; an older snapshot is ignored."""
        async with self._update_lock:
            if membership.version <= self._membership.version:
                return
            self._membership = membership
            wanted = {(engine.engine_id, engine.incarnation): engine for engine in membership.engines}
            gone = [key for key in self._sessions if key not in wanted]
            await asyncio.gather(*(self._sessions.pop(key).close() for key in gone))
            fresh = [EngineSession(engine) for key, engine in wanted.items() if key not in self._sessions]
            await asyncio.gather(*(self._open(session) for session in fresh))
            self._change.set()
            self._change = asyncio.Event()

    async def close(self) -> None:
        """Close every session."""
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    async def _open(self, session: EngineSession) -> None:
        try:
            await session.open()
        except EngineLost as error:
            logger.warning("an engine could not be reached", extra={"reason": str(error)})
            return
        descriptor = session.descriptor
        self._sessions[descriptor.engine_id, descriptor.incarnation] = session
