"""Calls to an ingress that get a single answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import grpc.aio

from cluster.client.errors import CallFailed, as_call_failed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import Deadline, RetryPolicy
from cluster.client.streams.attempts import Attempts

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Method = Callable[[Ingress], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]


class SingleCalls:
    """A client's calls that get a single answer. timeout_s: seconds, including waits and further tries, or None."""

    def __init__(self, ingresses: Ingresses, retry_policy: RetryPolicy) -> None:
        self._ingresses = ingresses
        self._retry_policy = retry_policy

    async def read(self, method: _Method[_Request, _Response], request: _Request, timeout_s: float | None) -> _Response:
        """Make a call that changes nothing, at an ingress, and at the others if that one is gone or full.

        If all ingresses are full, the call is made again after the delay that they name. Raises CallFailed.
        """
        attempts = Attempts(self._ingresses, timeout_s, self._retry_policy)
        ingress = await attempts.first()
        while True:
            try:
                with as_call_failed():
                    response = await method(ingress)(request, timeout=attempts.left_s())
            except CallFailed as failure:
                if not failure.is_passing:
                    raise
                attempts.note_failure(ingress, failure, is_under_way=False)
                ingress = await attempts.next_ingress(failure)
            else:
                ingress.note_answer()
                return response

    async def change(
        self, method: _Method[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        """Make a call that changes the cluster, at the first ingress that can be connected to. Raises CallFailed.

        The call is made once: one that has failed may have changed the cluster all the same.
        """
        deadline = Deadline(timeout_s, _now_s())
        ingress = await self._ingresses.find(timeout_s)
        with as_call_failed():
            return await method(ingress)(request, timeout=deadline.left_s(_now_s()))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
