"""The stream of snapshots for those who watch the live page.

One task makes a snapshot once a second while anybody watches, and none while nobody does. Each viewer has a short
queue of the same bytes. A viewer that reads too slowly misses snapshots, and sees by their numbers how many; it delays
nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from cluster.errors import Overloaded
from cluster.observability.live.live_snapshot import SnapshotMaker
from cluster.observability.status import ClusterView

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
MAX_VIEWERS: Final = 16
_MAX_QUEUED: Final = 4
_RETRY_DELAY_S: Final = 5.0


class LiveFeed:
    """The snapshots of one ingress and their viewers. It belongs to one event loop, on which run() runs."""

    def __init__(
        self,
        view: Callable[[], Awaitable[ClusterView]],
        make_maker: Callable[[], SnapshotMaker],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Make nothing yet.

        view:       makes a view of the cluster as it was lately, without asking another process
        make_maker: is called when the first viewer comes, and again after all have left
        interval_s: from one snapshot to the next
        """
        self._view = view
        self._make_maker = make_maker
        self._interval_s = interval_s
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._newcomers: set[asyncio.Queue[bytes | None]] = set()
        self._has_viewers = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._queues)

    def check_room(self) -> None:
        """Raise Overloaded if as many watch as may."""
        if len(self._queues) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch this ingress already: close one", _RETRY_DELAY_S)

    async def run(self) -> None:
        """Make snapshots while anybody watches, until the task is cancelled."""
        while True:
            await self._has_viewers.wait()
            try:
                await self._serve_viewers()
            except Exception:
                # A page must never stop an ingress: its viewers are sent away, and may come again.
                logger.exception("the live page's snapshots failed by a bug")
                self._dismiss()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of one viewer until the feed ends, as bytes of server-sent events. Raises Overloaded."""
        self.check_room()
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_QUEUED)
        self._queues.add(queue)
        self._newcomers.add(queue)
        self._has_viewers.set()
        try:
            while (data := await queue.get()) is not None:
                yield b"data: %b\n\n" % data
        finally:
            self._queues.discard(queue)
            self._newcomers.discard(queue)

    def close(self) -> None:
        """End the streams of all viewers."""
        self._dismiss()

    async def _serve_viewers(self) -> None:
        maker, loop = self._make_maker(), asyncio.get_running_loop()
        next_s = loop.time()
        while self._queues:
            data = maker.make(await self._view())
            first = maker.first() if self._newcomers else data
            for queue in self._queues:
                if not queue.full():
                    queue.put_nowait(first if queue in self._newcomers else data)
            self._newcomers.clear()
            next_s = max(next_s + self._interval_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
        self._has_viewers.clear()

    def _dismiss(self) -> None:
        for queue in self._queues:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
        self._queues.clear()
        self._newcomers.clear()
        self._has_viewers.clear()
