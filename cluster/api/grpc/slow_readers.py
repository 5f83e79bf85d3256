"""Cuts off clients that do not read the responses of their streams.

Responses that a client has not read are buffered up to HTTP/2's window. Then the write of the next response waits, and
the stream with it. The engine never waits: its further output is merged (cluster/sessions/request_stream.py), and takes
no more room than the tokens themselves. A client that lets a write wait for slow_reader_timeout_s is cut off.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from cluster.access.caller import current_caller
from cluster.errors import ReaderTooSlow

logger = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT: Final = 4

_Context = grpc.aio.ServicerContext[Any, Any]


class SlowReaders:
    """Watches the writes of all streams of a server. run() runs on the server's event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._streams: set[_WatchedContext] = set()
        self.num_cut = 0

    def watching(
        self, behavior: Callable[[Any, _Context], Awaitable[None]]
    ) -> Callable[[Any, _Context], Awaitable[None]]:
        """Return the behavior of a method that streams, with its writes watched."""

        @functools.wraps(behavior)
        async def watched(request: Any, context: _Context) -> None:
            stream = _WatchedContext(context)
            self._streams.add(stream)
            try:
                await behavior(request, stream)  # type: ignore[arg-type]  # it has all of the context's attributes
            except asyncio.CancelledError:
                if not stream.is_cut:
                    raise
                stream.task.uncancel()
                raise ReaderTooSlow(self._timeout_s) from None
            finally:
                self._streams.discard(stream)

        return watched

    async def run(self) -> None:
        """Cut off the streams whose write has waited too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS_PER_TIMEOUT)
            stalled_s = loop.time() - self._timeout_s
            for stream in [stream for stream in self._streams if stream.writing_since_s < stalled_s]:
                self._streams.discard(stream)
                self.num_cut += 1
                logger.warning(
                    "a stream is ended because its client does not read it",
                    extra={"peer": stream.peer(), "caller": stream.caller_name},
                )
                stream.is_cut = True
                stream.task.cancel()


class _WatchedContext:
    """A call's context that notes since when a write has been waiting."""

    def __init__(self, context: _Context) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call has one"
        self.task = task
        self.caller_name = current_caller().name
        self.is_cut = False
        self.writing_since_s = float("inf")
        self._context = context
        self._time = asyncio.get_running_loop().time
        self._write = context.write

    async def write(self, message: Any) -> None:
        """Write a response, and note when the write began."""
        self.writing_since_s = self._time()
        await self._write(message)
        self.writing_since_s = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
