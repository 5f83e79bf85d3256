"""Turns of the event loop for requests that could all go on at once."""

from __future__ import annotations

import asyncio


class Turns:
    """Passes of the event loop, given out one by one to the requests of one call.

    Checking and routing a long prompt takes milliseconds of the event loop. The prompts of one call become ready
    together, and would keep everybody else waiting until the last of them is through.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a pass in which no other request of the call has its turn.

        What the caller does after that without another await is done in this pass.
        """
        async with self._lock:
            # The lock alone would not do: it is free again in the same pass.
            await asyncio.sleep(0)
