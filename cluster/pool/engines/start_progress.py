"""The progress of a start, as a list of events that others can wait for."""

from __future__ import annotations

import asyncio


class ProgressLog:
    """Append-only; lives on one event loop."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._grew = asyncio.Event()

    def say(self, event: str) -> None:
        """Append an event and wake who waits."""
        self._events.append(event)
        self._grew.set()
        self._grew = asyncio.Event()

    async def after(self, count: int, timeout_s: float = 1.0) -> list[str]:
        """The events after the first `count`; waits up to timeout_s while there are none."""
        if len(self._events) <= count:
            try:
                await asyncio.wait_for(self._grew.wait(), timeout_s)
            except TimeoutError:
                return []
        return self._events[count:]
