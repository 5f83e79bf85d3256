"""Measures how late an event loop is. A loop that is busy with one piece of work for long answers nobody meanwhile.

The loop runs a callback several times a second, and another thread can see how long ago the callback was due. So a
health check on another thread can tell a process whose loop is busy from one that is dead.
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
    """Watches the event loop that start() is called on. Any thread may read busy_s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds"""
        self._clock = clock
        self._due_s: float | None = None
        """When the loop's next callback is due, on the clock; None before start()."""
        self._lags: deque[tuple[float, float]] = deque()
        """Times within the window at which the loop was late, and by how many seconds. Later lags are smaller."""

    def start(self) -> None:
        """Watch the running loop from now on, until it ends."""
        self._plan(asyncio.get_running_loop())

    @property
    def busy_s(self) -> float:
        """For how many seconds the loop's callback is overdue; 0 if it is not."""
        return 0.0 if self._due_s is None else max(0.0, self._clock() - self._due_s)

    @property
    def longest_lag_s(self) -> float:
        """The longest delay of the loop within the last minute, in seconds. Only the loop's thread may read it."""
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
