"""Measures how long engines take to start and to drain; the planner reckons with it."""

from __future__ import annotations

from collections import deque
from typing import Final

from cluster.planning.fleet_change import SwitchTimes

_NUM_KEPT: Final = 8
_UNKNOWN_START_S: Final = 60.0
_UNKNOWN_DRAIN_S: Final = 10.0


class SwitchClock:
    """The durations of the newest starts and drains, in seconds."""

    def __init__(self) -> None:
        self._starts_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._drains_s: deque[float] = deque(maxlen=_NUM_KEPT)

    def note_start(self, seconds: float) -> None:
        """Note the time from the decision to start an engine until it served."""
        self._starts_s.append(seconds)

    def note_drain(self, seconds: float) -> None:
        """Note the time from the begin of a drain until the engine was idle, or its time was over."""
        self._drains_s.append(seconds)

    @property
    def times(self) -> SwitchTimes:
        """The longest of the newest ones: a plan should not rest on the luckiest start. Guesses without any."""
        return SwitchTimes(
            start_s=max(self._starts_s, default=_UNKNOWN_START_S), drain_s=max(self._drains_s, default=_UNKNOWN_DRAIN_S)
        )
