"""Streams of output that outlive the ingress that they come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import grpc
import grpc.aio

from cluster.client.errors import CallFailed, call_failed
from cluster.client.ingresses import Ingress, Ingresses
from cluster.client.progress import StreamProgress
from cluster.ingress.protos.raypd.v1 import generate_pb2

_RETRY_DELAY_S: Final = 0.2
"""Of an ingress that does not say when to try again; others are called at once."""


async def stream_once(
    ingress: Ingress, request: generate_pb2.GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream one call's responses. Closing it cancels the call. Raises CallFailed."""
    call = ingress.generate.Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise call_failed(error) from error
    finally:
        call.cancel()


async def stream_resuming(
    ingresses: Ingresses,
    request: generate_pb2.GenerateRequest,
    timeout_s: float | None,
    recovery_timeout_s: float,
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream an answer, over further calls where one is cut. Closing it cancels the call that runs.

    Before anything has come, each ingress is called once. Raises CallFailed: the first failure that is the request's
    own, or the last one in time.
    """
    progress, patience = StreamProgress(request), _Patience(timeout_s, recovery_timeout_s)
    ingress = await ingresses.find(timeout_s)
    while True:
        was_connected = ingress.is_connected
        try:
            async with aclosing(stream_once(ingress, progress.next_request(), patience.call_timeout_s())) as responses:
                async for response in responses:
                    patience.renew()
                    yield progress.take(response)
            return
        except CallFailed as failure:
            if progress.has_ended:
                return  # All that was to come has come, but for the call's own end.
            if not failure.is_passing:
                raise
            # It had been taken on by an ingress that is gone now.
            is_cut = was_connected and not ingress.is_connected
            patience.note_failure(is_under_way=progress.has_begun or is_cut)
            ingresses.put_last(ingress, _RETRY_DELAY_S if failure.retry_delay_s is None else failure.retry_delay_s)
            ingress = await _next_ingress(ingresses, patience, failure)


async def _next_ingress(ingresses: Ingresses, patience: _Patience, failure: CallFailed) -> Ingress:
    """Where to go on. Raises CallFailed if that is nowhere, or not in time."""
    if not patience.is_under_way:
        if patience.num_failures >= len(ingresses):
            raise failure
        return await ingresses.find(patience.call_timeout_s())
    ingress = await ingresses.wait_usable(patience.recovery_s())
    if ingress is None and patience.is_overdue():
        message = f"the deadline passed while the answer waited for an ingress to go on with; {failure}"
        raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, message) from failure
    if ingress is None:
        raise failure
    return ingress


class _Patience:
    """How long to go on. Times are of the event loop.

    is_under_way: an ingress had taken the request on
    num_failures: since anything has come
    """

    def __init__(self, timeout_s: float | None, recovery_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._give_up_s = 0.0
        self.is_under_way = False
        self.num_failures = 0

    def renew(self) -> None:
        """The answer goes on."""
        self.num_failures = 0

    def note_failure(self, *, is_under_way: bool) -> None:
        """A call has failed."""
        self.is_under_way |= is_under_way
        if self.num_failures == 0:
            self._give_up_s = self._loop.time() + self._recovery_timeout_s
        self.num_failures += 1

    def call_timeout_s(self) -> float | None:
        """What is left for a call; None for as long as it takes."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    def recovery_s(self) -> float:
        """What is left to find an ingress that goes on."""
        limit_s = self._give_up_s if self._deadline_s is None else min(self._give_up_s, self._deadline_s)
        return max(0.0, limit_s - self._loop.time())

    def is_overdue(self) -> bool:
        """Whether the caller's time is over."""
        return self._deadline_s is not None and self._loop.time() >= self._deadline_s
