"""The virtual clock, and what is due on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, TypeVarTuple

Args = TypeVarTuple("Args")

_AFTER_STEPS: Final = 1 << 40
"""Sorts what is no end of a step behind the ends of steps at the same time."""


class EventQueue:
    """Runs events in the order of their times.

    At equal times ends of steps come first, by their engine's number, and then all others in the order in which they
    were put here. So the order is the same whether an engine takes its steps one at a time or many at once.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = 0

    def clock(self) -> float:
        """Return the time: seconds from the beginning of the workload."""
        return self.now_s

    def at(self, time_s: float, action: Callable[[*Args], None], *args: *Args) -> None:
        """Call the action at a time that has not passed."""
        self._put(time_s, _AFTER_STEPS, action, args)

    def at_end_of_step(self, time_s: float, engine: int, action: Callable[[*Args], None], *args: *Args) -> None:
        """Call the action when a step of an engine ends. engine: the engine's number"""
        self._put(time_s, engine, action, args)

    def _put(self, time_s: float, rank: int, action: Callable[..., None], args: tuple[object, ...]) -> None:
        assert time_s >= self.now_s, f"{time_s} has passed: it is {self.now_s}"
        self._num_events += 1
        heapq.heappush(self._heap, (time_s, rank, self._num_events, action, args))

    def run(self, until_s: float, is_done: Callable[[], bool]) -> None:
        """Run events in their order, those included that they bring about, up to a time or until is_done()."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not is_done():
            self.now_s, _, _, action, args = heapq.heappop(heap)
            action(*args)
