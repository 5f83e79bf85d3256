"""Comments and events of a stream take turns, and whoever takes neither is cut off.

Tests of cluster/api/http/streams.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from cluster.api.http.open_streams import OpenStreams, StreamTimes
from cluster.api.http.streams import ABORT, EventStream

COMMENT = b": keep-alive\n\n"
NEVER_S = 1000.0
_NO_ANSWER: Any = None
"""Nobody asks it for anything."""


@dataclass
class Client:
    """It takes what it is sent while it reads. sent: the bodies that it was sent, those that it has not taken too"""

    reads: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: asyncio.Event = field(default_factory=asyncio.Event)
    events: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    sent: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    num_under_way: int = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            assert not self.num_under_way, "one message at a time"
            self.num_under_way += 1
            self.sent.put_nowait(message["body"])
            await self.reads.wait()
            self.num_under_way -= 1

    async def each_event(self) -> AsyncGenerator[bytes, None]:
        while event := await self.events.get():
            yield event


@asynccontextmanager
async def _streaming(times: StreamTimes) -> AsyncIterator[tuple[EventStream, Client, OpenStreams]]:
    streams, client = OpenStreams(times), Client()
    stream = EventStream("r", _NO_ANSWER, client.each_event(), streams)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(streams.run())
        streaming = tasks.create_task(stream({ABORT: client.is_cut.set}, _receive, client.send))
        yield stream, client, streams
        client.reads.set()
        client.events.put_nowait(b"")
        await streaming
        looking.cancel()
    assert not len(streams)


async def _receive() -> Message:
    raise AssertionError("nobody asks for it")


async def test_an_event_waits_for_a_comment_that_is_under_way() -> None:
    async with _streaming(StreamTimes(NEVER_S, keep_alive_interval_s=0.02)) as (_, client, _):
        assert await client.sent.get() == COMMENT
        for number in range(3):
            client.events.put_nowait(b"%d" % number)
        await asyncio.sleep(0)
        client.reads.set()
        sent: list[bytes] = []
        while b"2" not in sent:
            sent.append(await client.sent.get())
        assert [body for body in sent if body != COMMENT] == [b"0", b"1", b"2"]


async def test_no_comment_begins_while_an_event_is_under_way() -> None:
    async with _streaming(StreamTimes(NEVER_S, keep_alive_interval_s=None)) as (stream, client, _):
        client.events.put_nowait(b"event")
        assert await client.sent.get() == b"event"
        await stream.comment()
        assert client.sent.empty()
        client.reads.set()
        await asyncio.sleep(0)
        await stream.comment()
        assert await client.sent.get() == COMMENT


async def test_a_stream_that_has_ended_sends_no_comment() -> None:
    async with _streaming(StreamTimes(NEVER_S, keep_alive_interval_s=None)) as (stream, client, _):
        pass
    assert await client.sent.get() == b"", "the end"
    await stream.comment()
    assert client.sent.empty()


async def test_whoever_takes_no_event_is_cut_off_once() -> None:
    async with _streaming(StreamTimes(0.05, keep_alive_interval_s=None)) as (_, client, streams):
        client.events.put_nowait(b"event")
        await client.is_cut.wait()
        assert not len(streams), "nobody looks after it any more"


async def test_whoever_does_not_take_the_end_is_cut_off() -> None:
    async with _streaming(StreamTimes(0.05, keep_alive_interval_s=None)) as (_, client, _):
        client.events.put_nowait(b"")
        await client.is_cut.wait()
        assert await client.sent.get() == b"", "the end"


async def test_whoever_does_not_even_take_a_comment_is_cut_off() -> None:
    async with _streaming(StreamTimes(0.05, keep_alive_interval_s=0.02)) as (_, client, _):
        await client.is_cut.wait()
        assert await client.sent.get() == COMMENT


def test_looks_are_as_frequent_as_the_shorter_time_needs() -> None:
    assert StreamTimes(60.0, 15.0).look_interval_s == 15.0 / 8
    assert StreamTimes(60.0, None).look_interval_s == 60.0 / 8
    assert StreamTimes(0.4, 15.0).look_interval_s == 0.05
