"""The progress of a start: a list of events in words."""

from __future__ import annotations


class ProgressLog:
    """The events of a start, oldest first."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def say(self, event: str) -> None:
        """Append an event."""
        self._events.append(event)

    def after(self, count: int) -> list[str]:
        """Return the events after the first `count` ones."""
        return self._events[count:]
