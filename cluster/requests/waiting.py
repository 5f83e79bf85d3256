"""Waiting for engines that a request can go on with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.errors import NoEngineAvailable
from cluster.routing.engine_connection import EnginePool

_T = TypeVar("_T")


async def choose_in_time(choose: Callable[[], _T], engines: EnginePool, limit_s: float) -> _T:
    """Choose engines; wait for them while there are none.

    limit_s: on the event loop's clock. Raises NoEngineAvailable if none came by then, and what choose() raises.
    """
    while True:
        change = engines.next_change()
        try:
            return choose()
        except NoEngineAvailable:
            if not await _is_set_in_time(change, limit_s):
                raise


async def _is_set_in_time(event: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout_at(limit_s):
            return await event.wait()
    except TimeoutError:
        return False
