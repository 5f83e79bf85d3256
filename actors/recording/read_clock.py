"""A clock whose readings are recorded, and a clock that replays recorded readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class ReadClock:
    """A clock whose readings are kept between begin() and end(), that is, during one recorded call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: list[float] | None = None

    def __call__(self) -> float:
        """Return the time."""
        now_s = self._clock()
        if self._readings is not None:
            self._readings.append(now_s)
        return now_s

    def begin(self) -> bool:
        """Keep readings from now on. Returns False, and changes nothing, within a call that is recorded already."""
        if self._readings is not None:
            return False
        self._readings = []
        return True

    def end(self) -> tuple[float, ...]:
        """Return the readings since begin()."""
        readings, self._readings = self._readings, None
        return tuple(readings or ())


class ReplayedClock:
    """A clock that returns the readings of another clock again."""

    def __init__(self) -> None:
        self._readings: list[float] = []
        self._num_read = 0

    def __call__(self) -> float:
        """Return the next reading; the last one again if none is left, and then is_used_up is False."""
        self._num_read += 1
        return self._readings[min(self._num_read, len(self._readings)) - 1] if self._readings else 0.0

    def load(self, readings_s: Sequence[float]) -> None:
        """Return these readings from now on."""
        self._readings, self._num_read = list(readings_s), 0

    @property
    def is_used_up(self) -> bool:
        """Whether as many readings were asked for as there were."""
        return self._num_read == len(self._readings)
