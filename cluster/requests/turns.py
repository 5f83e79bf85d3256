"""Spreads the requests of one call over several passes of the event loop."""

from __future__ import annotations

import asyncio


class Turns:
    """Passes of the event loop, given out one by one to the requests of one call.

    Checking and routing a long prompt takes milliseconds of the event loop. The prompts of one call become ready
    together, and without turns all other requests would wait until the last of these prompts is routed.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a pass of the event loop in which no other request of the call has its turn.

        The turn lasts until the caller's next await.
        """
        async with self._lock:
            # The lock alone is not enough, because another task can acquire it in the same pass of the event loop.
            await asyncio.sleep(0)
