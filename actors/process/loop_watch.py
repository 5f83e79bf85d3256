"""How late an event loop is: a loop that works on one thing for long answers nobody, and does not know it.

The loop notes several times a second that it has got round; another thread sees for how long it has not. A process is
dead only if nobody in it answers; one whose loop is busy says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_INTERVAL_S: Final = 0.25
_WINDOW_S: Final = 60.0


class LoopWatch:
    """Watches the event loop that start() is called on. busy_s may be read from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds, monotonic."""
        self._clock = clock
        self._due_s: float | None = None
        """When the loop is to get round next; None before the start."""
        self._lags: deque[tuple[float, float]] = deque()
        """When the loop was late within the window and by how much: later ones are smaller."""

    def start(self) -> None:
        """Watch the running loop from now on, until it ends."""
        self._plan(asyncio.get_running_loop())

    @property
    def busy_s(self) -> float:
        """For how long the loop has not got round; 0 while it does."""
        return 0.0 if self._due_s is None else max(0.0, self._clock() - self._due_s)

    @property
    def longest_lag_s(self) -> float:
        """By how much the loop was late at most, within the last minute. Belongs to the loop's thread."""
        self._forget()
        return max(self.busy_s, self._lags[0][1] if self._lags else 0.0)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = self._clock() + _INTERVAL_S
        loop.call_later(_INTERVAL_S, self._get_round, loop)

    def _get_round(self, loop: asyncio.AbstractEventLoop) -> None:
        lag_s = self.busy_s
        while self._lags and self._lags[-1][1] <= lag_s:
            self._lags.pop()
        self._lags.append((self._clock(), lag_s))
        self._forget()
        self._plan(loop)

    def _forget(self) -> None:
        while self._lags and self._lags[0][0] <= self._clock() - _WINDOW_S:
            self._lags.popleft()
