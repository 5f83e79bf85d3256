"""Looks after all streams of a server, once in a while: those that are silent, and those that nobody reads.

Streams only note what they do and when: neither a task nor a timer of their own for each of them, or for each event.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

_LOOKS_PER_TIME: Final = 8
_MIN_INTERVAL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """slow_reader_timeout_s: a client that takes nothing for so long is cut off

    keep_alive_interval_s: no stream is silent for longer, it sends a comment before; None: none does
    """

    slow_reader_timeout_s: float
    keep_alive_interval_s: float | None

    @property
    def look_interval_s(self) -> float:
        """Between two looks at all streams."""
        shortest_s = min(self.slow_reader_timeout_s, self.keep_alive_interval_s or self.slow_reader_timeout_s)
        return max(_MIN_INTERVAL_S, shortest_s / _LOOKS_PER_TIME)


class OpenStream(Protocol):
    """is_sending: whether something is under way to the client; since_s: when that, or the last one, began"""

    is_sending: bool
    since_s: float

    async def comment(self) -> None:
        """Tell that it lives, unless it does so already."""
        ...

    def cut(self) -> None:
        """Cut its client off."""
        ...


class OpenStreams:
    """Those of one server. run() belongs to its event loop."""

    def __init__(self, times: StreamTimes) -> None:
        self._times = times
        self._streams: set[OpenStream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: OpenStream) -> None:
        """Look after it from now on."""
        self._streams.add(stream)

    def discard(self, stream: OpenStream) -> None:
        """It is over."""
        self._streams.discard(stream)

    async def run(self) -> None:
        """Look after them until cancelled."""
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
        """Those that would be silent for too long by the next look."""
        keep_alive_s = self._times.keep_alive_interval_s
        if keep_alive_s is None:
            return []
        last_s = asyncio.get_running_loop().time() - keep_alive_s + self._times.look_interval_s
        return [stream for stream in self._streams if not stream.is_sending and stream.since_s < last_s]

    def _stalled(self) -> list[OpenStream]:
        last_s = asyncio.get_running_loop().time() - self._times.slow_reader_timeout_s
        return [stream for stream in self._streams if stream.is_sending and stream.since_s < last_s]
