"""Decides which ingress a request is sent to, and which one after a failure."""

from __future__ import annotations

import asyncio
import math

import grpc

from cluster.client.errors import CallFailed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import Deadline, RetryPolicy


class Attempts:
    """The calls of one request: which ingress is called next, and when to give up. Times are of the event loop.

    _is_under_way: whether an ingress had accepted the request
    _tried:        the ingresses that have failed since the last response came
    _refusal:      the last of these failures that named a delay; None: none did
    _back_at_s:    the earliest time at which one of these delays is over
    """

    def __init__(
        self, ingresses: Ingresses, timeout_s: float | None, retry_policy: RetryPolicy, *, is_under_way: bool = False
    ) -> None:
        self._ingresses = ingresses
        self._retry_policy = retry_policy
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(timeout_s, self._loop.time())
        self._failing_since_s = 0.0
        self._is_under_way = is_under_way
        self._tried: set[Ingress] = set()
        self._refusal: CallFailed | None = None
        self._back_at_s = math.inf

    async def first(self) -> Ingress:
        """Return the ingress for the first call."""
        return await self._ingresses.find(self.left_s())

    def left_s(self) -> float | None:
        """Return how many seconds are left for a call; None if the caller set no limit."""
        return self._deadline.left_s(self._loop.time())

    def renew(self) -> None:
        """Note that a response has come: earlier failures count no more."""
        if self._tried:
            self._tried, self._refusal, self._back_at_s = set(), None, math.inf

    def note_failure(self, ingress: Ingress, failure: CallFailed, *, is_under_way: bool) -> None:
        """Note that a call has failed. is_under_way: whether the ingress had accepted the request"""
        self._is_under_way |= is_under_way
        if not self._tried:
            self._failing_since_s = self._loop.time()
        self._tried.add(ingress)
        self._ingresses.put_last(ingress, failure.retry_delay_s)
        if failure.retry_delay_s is not None:
            self._refusal = failure
            self._back_at_s = min(self._back_at_s, self._loop.time() + ingress.shunned_s)

    async def next_ingress(self, failure: CallFailed) -> Ingress:
        """Return the ingress for the next call. Raises CallFailed if there is none in time.

        failure: the last call's, which is raised unless another one tells more
        """
        if self._is_under_way:
            return await self._wait(failure, self._retry_policy.recovery_timeout_s)
        if len(self._tried) < len(self._ingresses):
            return await self._ingresses.find(self.left_s(), without=self._tried)
        refusal = self._refusal
        # Raise at once if the wait would last longer than the caller allows.
        if refusal is None or self._back_at_s > self._loop.time() + self._limit_s(
            self._retry_policy.overload_timeout_s
        ):
            raise refusal or failure
        self._back_at_s = math.inf
        return await self._wait(refusal, self._retry_policy.overload_timeout_s)

    async def _wait(self, failure: CallFailed, timeout_s: float) -> Ingress:
        ingress = await self._ingresses.wait_usable(self._limit_s(timeout_s))
        if ingress is None and self._deadline.is_over(self._loop.time()):
            message = f"the deadline passed while the answer waited for an ingress to go on with; {failure}"
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, message) from failure
        if ingress is None:
            raise failure
        return ingress

    def _limit_s(self, timeout_s: float) -> float:
        """Return how many seconds are left of timeout_s since calls began to fail, and of the caller's own limit."""
        now_s = self._loop.time()
        return self._deadline.cap(max(0.0, self._failing_since_s + timeout_s - now_s), now_s)
