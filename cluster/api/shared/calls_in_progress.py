"""The calls that a server works on, which a drain waits for.

gRPC's own stop() cancels a call that arrives while it is under way, and its client sees CANCELLED, as if it had given
up itself. So calls are refused here first, with a reason; server.py has the rest of how an ingress ends.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from cluster.errors import Draining


class CallsInProgress:
    """An async context manager that every call is answered inside of. Belongs to one event loop."""

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
