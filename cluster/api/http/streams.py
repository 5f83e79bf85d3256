"""Sends answers as server-sent events, and cancels the work for clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
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
"""The scope's key of a function that cuts its connection off."""
_DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


async def unless_client_leaves(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work, and cancel it when the client hangs up. The request's body has to be received already.

    A client that leaves leaves nothing to the garbage collector, as an asyncio.TaskGroup would: the error of a group
    refers to itself, and to the frames of the work, which have the prompt.
    """
    working, has_left = asyncio.current_task(), False
    assert working is not None, "requests are worked on in tasks"

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work()
    except asyncio.CancelledError:
        if not has_left or working.cancelling() > 1:
            raise
        logger.debug("a client has left")
    finally:
        watching.cancel()
        if has_left:
            working.uncancel()


async def events_of(
    answer: Answer, chunks: AsyncGenerator[tuple[int, GenerateChunk], None]
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's bytes: the events of each chunk, of which there may be none, and the events of the end."""
    encode = msgspec.json.Encoder().encode
    async with aclosing(chunks):
        async for index, chunk in chunks:
            yield b"".join([b"data: %b\n\n" % encode(event) for event in answer.events(index, chunk)])
    yield b"".join([*(b"data: %b\n\n" % encode(event) for event in answer.last_events()), _DONE])


class EventStream(Response):
    """The answer to a call as a stream. Until its first bytes are sent, an error is answered by a status of its own.

    Invariant: one message at a time is being sent, and each is whole: a comment never splits an event. A comment begins
    only when nothing is being sent; events, of which there are many more, wait for its end.
    """

    def __init__(
        self, answer_id: str, names: Mapping[str, str], events: AsyncGenerator[bytes, None], streams: OpenStreams
    ) -> None:
        """Keep the events; __call__() sends them.

        names:   the fields' names over HTTP, by Serving's names, where the two differ
        events:  their bytes; the generator is closed when the stream ends, for whatever reason
        streams: the server's streams, which this one joins while it is being sent
        """
        super().__init__(None, 200)
        self._id = answer_id
        self._names = names
        self._events = events
        self._streams = streams
        self._comment_over: asyncio.Event | None = None
        self._has_begun = self._has_ended = False
        self._time = asyncio.get_running_loop().time
        self.is_sending = False
        self.since_s = self._time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. OpenStreams cuts off a client that reads nothing for too long."""
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
        """Send a comment, unless a write is under way already."""
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
        """Close the client's connection."""
        logger.warning("a client does not read its stream: its connection is closed", extra={"request_id": self._id})
        self._abort()

    async def _send_events(self) -> HttpError | None:
        """Send the events; returns the error that ended them, or None."""
        try:
            async for event in self._events:
                if event:
                    if self._comment_over is not None:
                        await self._wait_for_comment()
                    await self._write(event)
        except ClusterError as error:
            if isinstance(error, InvalidRequest):
                error = renamed(error, self._names)
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
