"""How long a client waits, and how often it asks again. Pure: the clock and the chances are arguments."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_FIRST_DELAY_S: Final = 0.2
_MAX_DELAY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """What a client puts up with. Times are in seconds.

    recovery_timeout_s: how long an answer that was cut waits for an ingress to go on with it
    overload_timeout_s: how long a new request is asked again while every ingress that is there refuses it and says when
                        to come back; 0: not at all
    """

    recovery_timeout_s: float = 60.0
    overload_timeout_s: float = 30.0


class Deadline:
    """When the caller's time is over. now_s: on the same clock in every call."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        self._at_s = None if timeout_s is None else now_s + timeout_s

    def left_s(self, now_s: float) -> float | None:
        """What is left; None without end."""
        return None if self._at_s is None else max(0.0, self._at_s - now_s)

    def cap(self, limit_s: float, now_s: float) -> float:
        """So long, or what is left if that is less."""
        left_s = self.left_s(now_s)
        return limit_s if left_s is None else min(limit_s, left_s)

    def is_over(self, now_s: float) -> bool:
        """Whether nothing is left."""
        return self._at_s is not None and now_s >= self._at_s


def retry_delay_s(told_s: float | None, num_failures: int, rng: random.Random) -> float:
    """How long to leave an ingress alone that has failed so many times in a row.

    What it says itself is waited for, and up to half as long on top; otherwise 0.2 s, twice as long each time up to
    2 s, give or take a half. So those who were refused, or cut, together do not come back together.
    """
    if told_s is not None:
        return told_s * rng.uniform(1.0, 1.5)
    # The exponent is bounded: an ingress may be away for days.
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 8)) * rng.uniform(0.5, 1.5)
