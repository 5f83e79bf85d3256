"""Which ingress a request goes to, and to which one after that."""

from __future__ import annotations

import asyncio
import math

import grpc

from cluster.client.errors import CallFailed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import Deadline, Patience


class Attempts:
    """Which ingress to call next, and when to stop. Times are of the event loop.

    _is_under_way: an ingress had taken the request on
    _tried:   whom it was refused by, or cut, since anything has come
    _refusal: of these the last one that said when to come back; _back_at_s: the earliest of these times
    """

    def __init__(
        self, ingresses: Ingresses, timeout_s: float | None, patience: Patience, *, is_under_way: bool = False
    ) -> None:
        self._ingresses = ingresses
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(timeout_s, self._loop.time())
        self._failing_since_s = 0.0
        self._is_under_way = is_under_way
        self._tried: set[Ingress] = set()
        self._refusal: CallFailed | None = None
        self._back_at_s = math.inf

    async def first(self) -> Ingress:
        """The preferred one."""
        return await self._ingresses.find(self.left_s())

    def left_s(self) -> float | None:
        """What is left for a call; None for as long as it takes."""
        return self._deadline.left_s(self._loop.time())

    def renew(self) -> None:
        """The answer goes on."""
        if self._tried:
            self._tried, self._refusal, self._back_at_s = set(), None, math.inf

    def note_failure(self, ingress: Ingress, failure: CallFailed, *, is_under_way: bool) -> None:
        """A call has failed."""
        self._is_under_way |= is_under_way
        if not self._tried:
            self._failing_since_s = self._loop.time()
        self._tried.add(ingress)
        self._ingresses.put_last(ingress, failure.retry_delay_s)
        if failure.retry_delay_s is not None:
            self._refusal = failure
            self._back_at_s = min(self._back_at_s, self._loop.time() + ingress.shunned_s)

    async def next_ingress(self, failure: CallFailed) -> Ingress:
        """Where to go on. Raises CallFailed if that is nowhere, or not in time."""
        if self._is_under_way:
            return await self._wait(failure, self._patience.recovery_timeout_s)
        if len(self._tried) < len(self._ingresses):
            return await self._ingresses.find(self.left_s(), without=self._tried)
        refusal = self._refusal
        # It would be too late, and that is known now.
        if refusal is None or self._back_at_s > self._loop.time() + self._limit_s(self._patience.overload_timeout_s):
            raise refusal or failure
        self._back_at_s = math.inf
        return await self._wait(refusal, self._patience.overload_timeout_s)

    async def _wait(self, failure: CallFailed, timeout_s: float) -> Ingress:
        ingress = await self._ingresses.wait_usable(self._limit_s(timeout_s))
        if ingress is None and self._deadline.is_over(self._loop.time()):
            message = f"the deadline passed while the answer waited for an ingress to go on with; {failure}"
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, message) from failure
        if ingress is None:
            raise failure
        return ingress

    def _limit_s(self, timeout_s: float) -> float:
        """What is left of so long since calls fail, and of the caller's time."""
        now_s = self._loop.time()
        return self._deadline.cap(max(0.0, self._failing_since_s + timeout_s - now_s), now_s)
