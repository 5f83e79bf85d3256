"""The progress of a start: a list of events in words, for which a caller can wait."""

from __future__ import annotations

import asyncio


class ProgressLog:
    """The events of a start, oldest first. Only one event loop uses this object."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._grew = asyncio.Event()

    def say(self, event: str) -> None:
        """Append an event, and wake the callers that wait in after()."""
        self._events.append(event)
        self._grew.set()
        self._grew = asyncio.Event()

    async def after(self, count: int, timeout_s: float = 1.0) -> list[str]:
        """Return the events after the first `count` ones; wait up to timeout_s seconds if there are none yet."""
        if len(self._events) <= count:
            try:
                await asyncio.wait_for(self._grew.wait(), timeout_s)
            except TimeoutError:
                return []
        return self._events[count:]
