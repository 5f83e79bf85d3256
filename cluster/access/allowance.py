"""What one token may still use. Pure, but for the clock that it is given.

Requests and tokens per second are buckets that fill at that rate. A request takes one from the first when it comes.
Tokens are paid for after they were used, prompt and output alike: nobody knows before how many there will be. So the
second bucket may fall below zero, and whoever is in debt gets no further request until it is paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cluster.errors import AllowanceSpent

_BUSY_DELAY_S: Final = 1.0
"""When to try again with too many requests at once: nobody knows when one ends."""


@dataclass(frozen=True, slots=True)
class AllowanceLimits:
    """Of one token, at each ingress; None is unlimited.

    burst_s: so much of what was not used of a rate is kept
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    concurrent: int | None = None
    burst_s: float = 10.0


class Allowance:
    """Belongs to one token, for as long as the process lives."""

    def __init__(
        self, name: str = "", limits: AllowanceLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """name: the token's."""
        self._name = name
        self._clock = clock
        self._num_running = 0
        self.set_limits(limits or AllowanceLimits())

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return self._num_running

    def set_limits(self, limits: AllowanceLimits) -> None:
        """Hold it to these from now on; the buckets are full."""
        self._limits = limits
        now_s = self._clock()
        self._requests = _bucket(limits.requests_per_s, limits.burst_s, now_s)
        self._tokens = _bucket(limits.tokens_per_s, limits.burst_s, now_s)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, a request runs. Raises AllowanceSpent."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """A request comes; end() has to follow. Raises AllowanceSpent, and then it has not."""
        limits = self._limits
        if limits.concurrent is not None and self._num_running >= limits.concurrent:
            raise AllowanceSpent(self._name, f"{limits.concurrent} requests at once", _BUSY_DELAY_S)
        self.take_request()
        self._num_running += 1

    def take_request(self) -> None:
        """A call comes that is over at once. Raises AllowanceSpent."""
        now_s = self._clock()
        if self._tokens is not None and (delay_s := self._tokens.delay_s(0.0, now_s)) > 0:
            raise AllowanceSpent(self._name, f"{self._limits.tokens_per_s:g} tokens/s", delay_s)
        if self._requests is not None:
            if (delay_s := self._requests.delay_s(1.0, now_s)) > 0:
                raise AllowanceSpent(self._name, f"{self._limits.requests_per_s:g} requests/s", delay_s)
            self._requests.take(1.0, now_s)

    def end(self) -> None:
        """A request that had begun is over."""
        self._num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """So many tokens were used."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())


class _Bucket:
    """Fills at a rate, up to its capacity. May be overdrawn."""

    def __init__(self, rate: float, capacity: float, now_s: float) -> None:
        self._rate = rate
        self._capacity = capacity
        self._level = capacity
        self._at_s = now_s

    def delay_s(self, amount: float, now_s: float) -> float:
        """How long until so much is in it; 0 if it is."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        self._level = min(self._capacity, self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s


def _bucket(rate: float | None, burst_s: float, now_s: float) -> _Bucket | None:
    return None if rate is None else _Bucket(rate, max(1.0, rate * burst_s), now_s)
