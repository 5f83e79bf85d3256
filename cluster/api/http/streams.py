"""Answers as server-sent events, and clients that leave in the middle of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.http.errors import HttpError, error_of, internal_error, renamed
from cluster.api.http.open_streams import OpenStreams
from cluster.api.http.openai.answers import Answer
from cluster.errors import ClusterError, InvalidRequest
from cluster.parameters.generation import GenerateChunk

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
            yield b"".join([b"data: %b\n\n" % encode(event) for event in answer.events(index, chunk)])
    yield b"".join([*(b"data: %b\n\n" % encode(event) for event in answer.last_events()), _DONE])


class EventStream(Response):
    """A stream. Until its first bytes are out its errors are answers of their own.

    Invariant: one message at a time is under way to the client, and each is whole: comments never cut an event. A
    comment begins only when nothing is being sent; events, of which there are many more, wait for it.
    """

    def __init__(
        self, answer_id: str, answer: Answer, events: AsyncGenerator[bytes, None], streams: OpenStreams
    ) -> None:
        """events: closed when the stream ends, however it does. streams: of its server"""
        super().__init__(None, 200)
        self._id = answer_id
        self._answer = answer
        self._events = events
        self._streams = streams
        self._comment_over: asyncio.Event | None = None
        self._has_begun = self._has_ended = False
        self._time = asyncio.get_running_loop().time
        self.is_sending = False
        self.since_s = self._time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Its server cuts off a client that takes nothing for too long, which then has left."""
        self._send = send
        self._abort: Callable[[], None] = scope[ABORT]
        self._streams.add(self)
        try:
            async with aclosing(self._events):
                failed = await self._send_events()
            await self._wait_for_comment()
            self._has_ended = True
            if failed is not None and not self._has_begun:
                await failed.response()(scope, receive, send)
                return
            if failed is not None:
                await self._write(b"data: %b\n\n" % failed.body)
            await self._write(b"", more_body=False)
        finally:
            self._has_ended = True
            self._streams.discard(self)

    async def comment(self) -> None:
        """Tell that it lives, unless it does so already."""
        if self.is_sending or self._has_ended:
            return
        self._comment_over = asyncio.Event()
        try:
            await self._write(_COMMENT)
        except Exception:
            logger.exception("a stream's comment failed by a bug", extra={"request_id": self._id})
            self._abort()
        finally:
            self._comment_over.set()
            self._comment_over = None

    def cut(self) -> None:
        """Cut its client off."""
        logger.warning("a client takes nothing and is cut off", extra={"request_id": self._id})
        self._abort()

    async def _send_events(self) -> HttpError | None:
        """Returns what went wrong."""
        try:
            async for event in self._events:
                if event:
                    if self._comment_over is not None:
                        await self._wait_for_comment()
                    await self._write(event)
        except ClusterError as error:
            if isinstance(error, InvalidRequest):
                error = renamed(error, self._answer.names)
            return error_of(error)
        except OSError:
            raise
        except Exception:
            logger.exception("a request failed by a bug", extra={"request_id": self._id})
            return internal_error(self._id)
        return None

    async def _wait_for_comment(self) -> None:
        while self._comment_over is not None:
            await self._comment_over.wait()

    async def _write(self, data: bytes, *, more_body: bool = True) -> None:
        self.is_sending = True
        self.since_s = self._time()
        if not self._has_begun:
            self._has_begun = True
            headers = [*_HEADERS, (b"x-request-id", self._id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more_body})
        self.is_sending = False
