"""The allowance of a bearer token: its limits, and how much of them is used. Pure; the clock is an argument.

The limits on requests and tokens per second are token buckets, which fill at these rates. Each request takes one unit
from the bucket of requests at its arrival. Prompt and output tokens are taken from their bucket after they were used,
since their number is not known before. So the second bucket may fall below zero; while it does, further requests are
refused.
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
"""The delay that is proposed if too many requests run at once: when one of them ends is not known."""
BURST_S: Final = 10.0
"""Seconds of unused requests and tokens that are saved up, unless a token's entry says otherwise."""


@dataclass(frozen=True, slots=True)
class AllowanceLimits:
    """The limits of one bearer token, at each ingress; None means no limit.

    requests_per_s: requests per second
    tokens_per_s:   prompt and output tokens per second, together
    concurrent:     requests that run at once
    burst_s:        the seconds of unused rate that can be saved up, the capacity of the buckets
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    concurrent: int | None = None
    burst_s: float = BURST_S


class Allowance:
    """The use of one bearer token in this process.

    paid_ahead() returns an allowance for one call, which shares the account of the token's allowance.
    """

    def __init__(
        self, name: str = "", limits: AllowanceLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """name: the token's name, for errors; clock: returns monotonic seconds"""
        self._name = name
        self._clock = clock
        self._num_paid = 0
        self._account = _Account(limits or AllowanceLimits(), clock())

    @property
    def num_running(self) -> int:
        """The number of requests that have begun and not ended."""
        return self._account.num_running

    def set_limits(self, limits: AllowanceLimits) -> None:
        """Set new limits, and fill the buckets."""
        self._account.set_limits(limits, self._clock())

    def paid_ahead(self) -> Allowance:
        """Count one request for a call whose body is not read yet.

        Returns an allowance for this call: the first request that begins with it is not counted again. Raises
        AllowanceSpent.
        """
        self.take_request()
        of_call = copy(self)
        of_call._num_paid = 1
        return of_call

    @contextmanager
    def used(self) -> Iterator[None]:
        """Begin a request at entry and end it at exit of the context. Raises AllowanceSpent at entry."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count a request that begins; end() has to follow.

        Raises AllowanceSpent if the request is over a limit; end() must not follow then.
        """
        most = self._account.limits.concurrent
        if most is not None and self._account.num_running >= most:
            raise AllowanceSpent(self._name, f"{most} requests at once", _BUSY_DELAY_S)
        if self._num_paid:
            self._num_paid -= 1
        else:
            self.take_request()
        self._account.num_running += 1

    def take_request(self) -> None:
        """Count a request without its end, such as a call that is answered at once. Raises AllowanceSpent."""
        now_s, account = self._clock(), self._account
        limits, requests, tokens = account.limits, account.requests, account.tokens
        if tokens is not None and (delay_s := tokens.delay_s(0.0, now_s)) > 0:
            raise AllowanceSpent(self._name, f"{limits.tokens_per_s:g} tokens/s", delay_s)
        if requests is not None:
            if (delay_s := requests.delay_s(1.0, now_s)) > 0:
                raise AllowanceSpent(self._name, f"{limits.requests_per_s:g} requests/s", delay_s)
            requests.take(1.0, now_s)

    def end(self) -> None:
        """Note the end of a request that had begun."""
        self._account.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Take tokens that a request has used from the bucket of tokens."""
        if self._account.tokens is not None:
            self._account.tokens.take(num_tokens, self._clock())


class _Account:
    """The limits of a bearer token, its buckets, and the number of its requests that run."""

    def __init__(self, limits: AllowanceLimits, now_s: float) -> None:
        self.num_running = 0
        self.set_limits(limits, now_s)

    def set_limits(self, limits: AllowanceLimits, now_s: float) -> None:
        self.limits = limits
        self.requests = _bucket(limits.requests_per_s, limits.burst_s, now_s)
        self.tokens = _bucket(limits.tokens_per_s, limits.burst_s, now_s)


class _Bucket:
    """A token bucket: its level rises at a rate per second up to its capacity, and may fall below zero."""

    def __init__(self, rate: float, capacity: float, now_s: float) -> None:
        self._rate = rate
        self._capacity = capacity
        self._level = capacity
        self._at_s = now_s

    def delay_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until the level is at least amount; 0 if it is already."""
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
