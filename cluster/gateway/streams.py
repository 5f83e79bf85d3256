"""Answers as server-sent events, and clients that leave in the middle of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ClusterError, InvalidRequest
from cluster.gateway.answers import Answer
from cluster.gateway.errors import error_of, internal_error, renamed
from cluster.generation import GenerateChunk

logger = logging.getLogger(__name__)

ABORT: Final = "raypd.abort"
"""Where a scope has what cuts its connection off."""
_DONE: Final = b"data: [DONE]\n\n"
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


class EventStream(Response):
    """A stream whose first bytes are there: until then its errors are answers of their own."""

    def __init__(
        self,
        answer_id: str,
        answer: Answer,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        slow_reader_timeout_s: float,
    ) -> None:
        """events: closed when the stream ends, however it does"""
        super().__init__(None, 200)
        self._id = answer_id
        self._answer = answer
        self._first = first
        self._events = events
        self._timeout_s = slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that takes nothing for too long is cut off."""
        try:
            async with aclosing(self._events):
                headers = [*_HEADERS, (b"x-request-id", self._id.encode())]
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
                await self._send(send, _body(self._first))
                await self._send_events(send)
                await self._send(send, {"type": "http.response.body", "body": b""})
        except TimeoutError:
            logger.warning("a client takes nothing and is cut off", extra={"request_id": self._id})
            scope[ABORT]()

    async def _send_events(self, send: Send) -> None:
        """What goes wrong now is the stream's last event: the answer's status is out already."""
        try:
            async for event in self._events:
                if event:
                    await self._send(send, _body(event))
        except ClusterError as error:
            if isinstance(error, InvalidRequest):
                error = renamed(error, self._answer.names)
            failed = error_of(error)
            await self._send(send, _body(b"data: %b\n\n" % failed.body))
        except (TimeoutError, OSError):
            raise
        except Exception:
            logger.exception("a request failed by a bug", extra={"request_id": self._id})
            await self._send(send, _body(b"data: %b\n\n" % internal_error(self._id).body))

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._timeout_s):
            await send(message)


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
