"""Answers as server-sent events, and clients that leave in the middle of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ClusterError, InvalidRequest
from cluster.gateway.answers import Answer
from cluster.gateway.errors import HttpError, error_of, internal_error, renamed
from cluster.generation import GenerateChunk

logger = logging.getLogger(__name__)

ABORT: Final = "raypd.abort"
"""Where a scope has what cuts its connection off."""
_DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class _ClientHasLeft(Exception):
    pass


async def unless_client_leaves(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work; cancel it when the client hangs up. The request's body has been received."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise _ClientHasLeft

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await work()
            watching.cancel()
    except* _ClientHasLeft:
        logger.debug("a client has left")


async def events_of(
    answer: Answer, chunks: AsyncGenerator[tuple[int, GenerateChunk], None]
) -> AsyncGenerator[bytes, None]:
    """A stream's bytes: something for each chunk, maybe nothing."""
    encode = msgspec.json.Encoder().encode
    async with aclosing(chunks):
        async for index, chunk in chunks:
            yield b"".join(b"data: %b\n\n" % encode(event) for event in answer.events(index, chunk))
    yield b"".join([*(b"data: %b\n\n" % encode(event) for event in answer.last_events()), _DONE])


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """slow_reader_timeout_s: a client that takes nothing for so long is cut off

    keep_alive_interval_s: a stream that has been silent for so long sends a comment; None: none does
    """

    slow_reader_timeout_s: float
    keep_alive_interval_s: float | None


class EventStream(Response):
    """A stream. Until its first bytes are out its errors are answers of their own.

    Invariant: one message at a time is under way to the client, and each is whole: comments never cut an event.
    """

    def __init__(self, answer_id: str, answer: Answer, events: AsyncGenerator[bytes, None], times: StreamTimes) -> None:
        """events: closed when the stream ends, however it does"""
        super().__init__(None, 200)
        self._id = answer_id
        self._answer = answer
        self._events = events
        self._times = times
        self._sending = asyncio.Lock()
        self._has_begun = False
        self._last_sent_s = asyncio.get_running_loop().time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that takes nothing for too long is cut off."""
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self._keep_alive(send))
                async with aclosing(self._events):
                    failed = await self._send_events(send)
                async with self._sending:
                    keeping.cancel()
                if failed is not None and not self._has_begun:
                    await failed.response()(scope, receive, send)
                    return
                if failed is not None:
                    await self._write(send, b"data: %b\n\n" % failed.body)
                await self._send(send, {"type": "http.response.body", "body": b""})
        except* TimeoutError:
            logger.warning("a client takes nothing and is cut off", extra={"request_id": self._id})
            scope[ABORT]()

    async def _send_events(self, send: Send) -> HttpError | None:
        """Returns what went wrong."""
        try:
            async for event in self._events:
                if event:
                    await self._write(send, event)
        except ClusterError as error:
            if isinstance(error, InvalidRequest):
                error = renamed(error, self._answer.names)
            return error_of(error)
        except (TimeoutError, OSError):
            raise
        except Exception:
            logger.exception("a request failed by a bug", extra={"request_id": self._id})
            return internal_error(self._id)
        return None

    async def _keep_alive(self, send: Send) -> None:
        interval_s = self._times.keep_alive_interval_s
        if interval_s is None:
            return
        while True:
            left_s = self._last_sent_s + interval_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                await self._write(send, _COMMENT)
            else:
                await asyncio.sleep(left_s)

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._sending:
            if not self._has_begun:
                self._has_begun = True
                headers = [*_HEADERS, (b"x-request-id", self._id.encode())]
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent_s = asyncio.get_running_loop().time()

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._times.slow_reader_timeout_s):
            await send(message)
