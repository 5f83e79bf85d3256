"""Engines in this process that have nothing left of any request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.engine_server import EngineServer

_TIMEOUT_S: Final = 60.0


async def until_all_idle(engines: Iterable[EngineServer]) -> None:
    """Wait until every engine has all its blocks back; then its invariants hold."""
    async with asyncio.timeout(_TIMEOUT_S):
        for engine in engines:
            await _until_idle(engine)
            engine.check_integrity()


async def _until_idle(engine: EngineServer) -> None:
    """An idle engine's counters may be older than what it did last: have it count anew."""
    thread = engine._thread
    assert thread is not None
    # The thread's own: the engine makes a copy of them whenever it is asked.
    before = thread.stats
    thread.wake()
    while thread.stats is before or not _is_empty(thread.stats):  # noqa: ASYNC110  # another thread
        await asyncio.sleep(0.02)


def _is_empty(stats: SchedulerStats) -> bool:
    return (
        stats.num_free_blocks == stats.num_blocks
        and stats.num_held_reqs == stats.num_running_reqs == stats.num_waiting_reqs == 0
        and stats.num_waiting_for_remote_kvs == 0
    )
