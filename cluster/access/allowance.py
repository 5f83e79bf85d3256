"""The allowance of one token: how much it may still use. Pure, but for the clock that it is given.

Requests and tokens per second are buckets that fill at that rate. A request takes one from the first when it comes.
Tokens are paid for after they were used, prompt and output alike: nobody knows before how many there will be. So the
second bucket may fall below zero, and whoever is in debt gets no further request until it is paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Final

from cluster.errors import AllowanceSpent

_BUSY_DELAY_S: Final = 1.0
"""When to try again with too many requests at once: nobody knows when one ends."""


@dataclass(frozen=True, slots=True)
class AllowanceLimits:
    """The limits of one token, at each ingress; None is unlimited.

    burst_s: so much of what was not used of a rate is kept
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    concurrent: int | None = None
    burst_s: float = 10.0


class Allowance:
    """Belongs to one token, for as long as the process lives; and, paid ahead, to one call with that token."""

    def __init__(
        self, name: str = "", limits: AllowanceLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """name: the token's."""
        self._name = name
        self._clock = clock
        self._num_paid = 0
        self._account = _Account(limits or AllowanceLimits(), clock())

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return self._account.num_running

    def set_limits(self, limits: AllowanceLimits) -> None:
        """Hold it to these from now on; the buckets are full."""
        self._account.set_limits(limits, self._clock())

    def paid_ahead(self) -> Allowance:
        """Take a request for a call that is not read yet; the first request that the returned one begins is that one.

        Raises AllowanceSpent.
        """
        self.take_request()
        of_call = copy(self)
        of_call._num_paid = 1
        return of_call

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
        most = self._account.limits.concurrent
        if most is not None and self._account.num_running >= most:
            raise AllowanceSpent(self._name, f"{most} requests at once", _BUSY_DELAY_S)
        if self._num_paid:
            self._num_paid -= 1
        else:
            self.take_request()
        self._account.num_running += 1

    def take_request(self) -> None:
        """A call comes that is over at once. Raises AllowanceSpent."""
        now_s, account = self._clock(), self._account
        limits, requests, tokens = account.limits, account.requests, account.tokens
        if tokens is not None and (delay_s := tokens.delay_s(0.0, now_s)) > 0:
            raise AllowanceSpent(self._name, f"{limits.tokens_per_s:g} tokens/s", delay_s)
        if requests is not None:
            if (delay_s := requests.delay_s(1.0, now_s)) > 0:
                raise AllowanceSpent(self._name, f"{limits.requests_per_s:g} requests/s", delay_s)
            requests.take(1.0, now_s)

    def end(self) -> None:
        """A request that had begun is over."""
        self._account.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """So many tokens were used."""
        if self._account.tokens is not None:
            self._account.tokens.take(num_tokens, self._clock())


class _Account:
    """A token's limits, and what it has used."""

    def __init__(self, limits: AllowanceLimits, now_s: float) -> None:
        self.num_running = 0
        self.set_limits(limits, now_s)

    def set_limits(self, limits: AllowanceLimits, now_s: float) -> None:
        self.limits = limits
        self.requests = _bucket(limits.requests_per_s, limits.burst_s, now_s)
        self.tokens = _bucket(limits.tokens_per_s, limits.burst_s, now_s)


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
