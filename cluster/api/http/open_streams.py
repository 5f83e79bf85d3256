"""Checks all streams of a server regularly: silent ones send a comment, and ones that nobody reads are ended.

A stream only notes what it does and when. So no stream, and no event, needs a task or a timer of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

_LOOKS_PER_TIME: Final = 8
_MIN_INTERVAL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The times of a server's streams.

    slow_reader_timeout_s: a client that reads nothing for this long is cut off
    keep_alive_interval_s: a stream sends a comment before it has been silent for this long; None: never
    """

    slow_reader_timeout_s: float
    keep_alive_interval_s: float | None

    @property
    def look_interval_s(self) -> float:
        """The time between two checks of all streams."""
        shortest_s = min(self.slow_reader_timeout_s, self.keep_alive_interval_s or self.slow_reader_timeout_s)
        return max(_MIN_INTERVAL_S, shortest_s / _LOOKS_PER_TIME)


class OpenStream(Protocol):
    """A stream that OpenStreams checks.

    is_sending: whether a write waits for the client
    since_s:    when this write, or the last one, began, on the event loop's clock
    """

    is_sending: bool
    since_s: float

    async def comment(self) -> None:
        """Send a comment, unless a write is under way already."""
        ...

    def cut(self) -> None:
        """Close the connection of the stream's client."""
        ...


class OpenStreams:
    """The streams of one server. run() runs on the server's event loop."""

    def __init__(self, times: StreamTimes) -> None:
        self._times = times
        self._streams: set[OpenStream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: OpenStream) -> None:
        """Check a stream from now on."""
        self._streams.add(stream)

    def discard(self, stream: OpenStream) -> None:
        """Check a stream no longer, because it has ended."""
        self._streams.discard(stream)

    async def run(self) -> None:
        """Check the streams until cancelled."""
        interval_s = self._times.look_interval_s
        async with asyncio.TaskGroup() as comments:
            while True:
                await asyncio.sleep(interval_s)
                for stream in self._silent():
                    comments.create_task(stream.comment())
                for stream in self._stalled():
                    self._streams.discard(stream)
                    stream.cut()

    def _silent(self) -> list[OpenStream]:
        """Return the streams that would be silent for too long by the next check."""
        keep_alive_s = self._times.keep_alive_interval_s
        if keep_alive_s is None:
            return []
        last_s = asyncio.get_running_loop().time() - keep_alive_s + self._times.look_interval_s
        return [stream for stream in self._streams if not stream.is_sending and stream.since_s < last_s]

    def _stalled(self) -> list[OpenStream]:
        last_s = asyncio.get_running_loop().time() - self._times.slow_reader_timeout_s
        return [stream for stream in self._streams if stream.is_sending and stream.since_s < last_s]
