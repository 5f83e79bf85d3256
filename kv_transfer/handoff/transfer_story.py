"""The story of one transfer: its last events and their times, kept for the log that explains a lost link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

_MAX_ENTRIES: Final = 32


@dataclass(slots=True)
class _Entry:
    """An event in a state. Events that repeat, or that alternate with one other event, are counted in one entry."""

    event: Enum
    state: Enum
    first_s: float
    last_s: float
    count: int = 1


class _Nothing(Enum):
    """The kind of the entry that stands before the first event."""

    NOTHING = 0


_NOTHING: Final = _Entry(_Nothing.NOTHING, _Nothing.NOTHING, 0.0, 0.0, 0)


class TransferStory:
    """The last events of a transfer, 32 entries at most. It belongs to the agent's thread.

    Invariant: _latest is the newest entry and _other the one before it, so a transfer whose COMPUTED and CHUNK_SENT
    take turns fills two entries.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: deque[_Entry] = deque(maxlen=_MAX_ENTRIES)
        self._began_s = clock()
        self._latest = self._other = _NOTHING

    def add(self, event: Enum, state: Enum) -> None:
        """Note that an event has come in this state."""
        now_s = self._clock()
        latest, other = self._latest, self._other
        if latest.event is event and latest.state is state:
            latest.last_s = now_s
            latest.count += 1
        elif other.event is event and other.state is state:
            other.last_s = now_s
            other.count += 1
        else:
            self._other = latest
            self._latest = _Entry(event, state, now_s, now_s)
            self._entries.append(self._latest)

    def tell(self, state: Enum) -> str:
        """Return the story in one line, the oldest event first. state: the transfer's present state."""
        words = [self._describe(entry) for entry in self._entries]
        return "; ".join([*words, f"{self._clock() - self._began_s:+.3f} s: now {state.name}"])

    def _describe(self, entry: _Entry) -> str:
        at = f"{entry.first_s - self._began_s:+.3f} s"
        if entry.count == 1:
            return f"{at}: {entry.event.name} in {entry.state.name}"
        until = f"{entry.last_s - self._began_s:+.3f} s"
        return f"{at} to {until}: {entry.count} x {entry.event.name} in {entry.state.name}"
