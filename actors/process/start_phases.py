"""Times the phases of an engine's start, which follow each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable


class StartPhases:
    """The phases of one start. begin() may be called on another thread than the other methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first phase, "starting". clock: seconds"""
        self._clock = clock
        self._begun: list[tuple[str, float]] = [("starting", clock())]

    @property
    def present(self) -> str:
        """The phase that was begun last, in a few words."""
        return self._begun[-1][0]

    def begin(self, phase: str) -> None:
        """End the present phase, and begin the next one."""
        self._begun.append((phase, self._clock()))

    def durations_s(self) -> dict[str, float]:
        """Return how many seconds each phase but the present one took, in their order. Equal phases are added up."""
        durations_s: dict[str, float] = {}
        begun = self._begun.copy()
        for (phase, began_s), (_, ended_s) in itertools.pairwise(begun):
            durations_s[phase] = durations_s.get(phase, 0.0) + ended_s - began_s
        return durations_s
