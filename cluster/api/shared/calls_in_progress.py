"""The calls that a server works on, which a drain waits for.

While gRPC's own stop() is under way, it cancels a call that arrives, and the client sees CANCELLED, as if the client
had given up. So calls are refused here first, with a reason. cluster/api/grpc/server.py describes the rest of a drain.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from cluster.errors import Draining


class CallsInProgress:
    """An async context manager in which every call is answered. It belongs to one event loop."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether new calls are refused."""
        return self._is_closed

    async def __aenter__(self) -> Self:
        """Begin a call. Raises Draining after close()."""
        if self._is_closed:
            raise Draining
        self._num_calls += 1
        self._is_empty.clear()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self._is_empty.set()

    async def close(self, grace_s: float) -> bool:
        """Refuse new calls, and wait for those that have begun; returns whether all have ended within grace_s."""
        self._is_closed = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True
