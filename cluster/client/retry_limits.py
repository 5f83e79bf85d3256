"""Decides how long a client waits and when it tries again. Pure: clock and random numbers are arguments."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_FIRST_DELAY_S: Final = 0.2
_MAX_DELAY_S: Final = 2.0

RECOVERY_TIMEOUT_S: Final = 60.0
OVERLOAD_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The limits of a client's retries.

    recovery_timeout_s: seconds that an answer which was cut waits for an ingress to go on with
    overload_timeout_s: seconds for which a new request is tried again while ingresses refuse it and name a delay;
                        0: it is not tried again
    """

    recovery_timeout_s: float = RECOVERY_TIMEOUT_S
    overload_timeout_s: float = OVERLOAD_TIMEOUT_S


class Deadline:
    """The time by which a caller wants its answer; timeout_s None: no limit. now_s: the time on one clock, always."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        self._at_s = None if timeout_s is None else now_s + timeout_s

    def left_s(self, now_s: float) -> float | None:
        """Return how many seconds are left; None if there is no limit."""
        return None if self._at_s is None else max(0.0, self._at_s - now_s)

    def cap(self, limit_s: float, now_s: float) -> float:
        """Return limit_s, or the seconds that are left if these are fewer."""
        left_s = self.left_s(now_s)
        return limit_s if left_s is None else min(limit_s, left_s)

    def is_over(self, now_s: float) -> bool:
        """Whether no time is left."""
        return self._at_s is not None and now_s >= self._at_s


def retry_delay_s(told_s: float | None, num_failures: int, rng: random.Random) -> float:
    """Return for how many seconds no call goes to an ingress that has failed.

    told_s:       the delay that the ingress named, to which up to half is added; None: it named none. Then the delay is
                  0.2 s, doubled with each failure up to 2 s, times a random number from 0.5 to 1.5
    num_failures: failures in a row, at least 1
    The random part keeps clients that were refused or cut off together from coming back together.
    """
    if told_s is not None:
        return told_s * rng.uniform(1.0, 1.5)
    # The exponent is bounded: an ingress may be away for days.
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 8)) * rng.uniform(0.5, 1.5)
