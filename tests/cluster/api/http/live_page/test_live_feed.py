from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from cluster.api.http.live_page.live_feed import MAX_VIEWERS, LiveFeed
from cluster.errors import Overloaded
from cluster.observability.live.live_snapshot import SnapshotMaker
from cluster.observability.status import ClusterView
from tests.cluster.observability.live.test_live_snapshot import NOW_S, Feed, ended, view


class _Source:
    """Views that a test lets through one by one, and the makers that were made."""

    def __init__(self) -> None:
        self.records = Feed(ended("a"))
        self.num_makers = self.num_views = 0
        self.turns = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def view(self) -> ClusterView:
        await self.turns.acquire()
        self.num_views += 1
        if self.error is not None:
            raise self.error
        return view()

    def make_maker(self) -> SnapshotMaker:
        self.num_makers += 1
        return SnapshotMaker(self.records, lambda most: (), ingress="ingress-0", version="1", now_s=NOW_S)


@asynccontextmanager
async def _running() -> AsyncIterator[tuple[LiveFeed, _Source]]:
    source = _Source()
    feed = LiveFeed(source.view, source.make_maker, interval_s=0.0)
    task = asyncio.create_task(feed.run())
    try:
        yield feed, source
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _next(stream: AsyncGenerator[bytes, None], source: _Source) -> dict[str, object]:
    coming = asyncio.ensure_future(anext(stream))
    await _settled()
    source.turns.release()
    event = await asyncio.wait_for(coming, 60)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    shown: dict[str, object] = json.loads(event[6:])
    return shown


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_nothing_is_made_while_nobody_watches() -> None:
    async with _running() as (feed, source):
        source.turns.release()
        await _settled()
        assert (source.num_makers, feed.num_viewers) == (0, 0)


async def test_a_viewer_gets_the_last_minute_first_and_then_what_is_new() -> None:
    async with _running() as (feed, source), aclosing(feed.watch()) as stream:
        first, second = await _next(stream, source), await _next(stream, source)
    assert (first["is_first"], first["number"], second["is_first"], second["number"]) == (True, 1, False, 2)
    assert second["stories"] == []


async def test_all_viewers_get_the_same_bytes() -> None:
    async with _running() as (feed, source), aclosing(feed.watch()) as one, aclosing(feed.watch()) as other:
        waiting = asyncio.create_task(anext(other))
        await _settled()
        await _next(one, source)
        await waiting
        source.turns.release()
        first, second = await asyncio.gather(anext(one), anext(other))
        assert first == second
        assert (source.num_makers, source.num_views) == (1, 2)


async def test_a_slow_viewer_misses_snapshots_and_delays_nobody() -> None:
    async with _running() as (feed, source), aclosing(feed.watch()) as slow, aclosing(feed.watch()) as fast:
        waiting = asyncio.create_task(anext(slow))
        await _settled()
        numbers = [(await _next(fast, source))["number"] for _ in range(10)]
        assert numbers == list(range(1, 11))
        seen = [json.loads((await waiting)[6:])["number"]]
        seen += [json.loads((await anext(slow))[6:])["number"] for _ in range(4)]
        assert seen == [1, 2, 3, 4, 5]
        await _next(fast, source)
        assert json.loads((await anext(slow))[6:])["number"] == 11


async def test_when_all_have_left_nothing_is_made_and_the_next_one_begins_anew() -> None:
    async with _running() as (feed, source):
        for num_makers in (1, 2):
            async with aclosing(feed.watch()) as stream:
                assert (await _next(stream, source))["number"] == 1
            source.turns.release()
            await _settled()
            assert (source.num_makers, feed.num_viewers) == (num_makers, 0)


async def test_viewers_are_bounded_by_number() -> None:
    async with _running() as (feed, source):
        streams = [feed.watch() for _ in range(MAX_VIEWERS)]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await _settled()
        with pytest.raises(Overloaded, match="16 viewers watch this ingress already"):
            feed.check_room()
        with pytest.raises(Overloaded):
            await anext(feed.watch())
        source.turns.release()
        await asyncio.gather(*waiting)
        await streams[0].aclose()
        feed.check_room()
        for stream in streams:
            await stream.aclose()


async def test_a_bug_in_a_snapshot_ends_the_streams_and_not_the_ingress(caplog: pytest.LogCaptureFixture) -> None:
    async with _running() as (feed, source):
        source.error = RuntimeError("a bug")
        async with aclosing(feed.watch()) as stream:
            source.turns.release()
            assert await asyncio.wait_for(anext(stream, None), 60) is None
        assert "the live page's snapshots failed by a bug" in caplog.text
        source.error = None
        async with aclosing(feed.watch()) as stream:
            assert (await _next(stream, source))["number"] == 1


async def test_closing_the_feed_ends_all_streams() -> None:
    async with _running() as (feed, source), aclosing(feed.watch()) as stream:
        await _next(stream, source)
        feed.close()
        assert await asyncio.wait_for(anext(stream, None), 60) is None
