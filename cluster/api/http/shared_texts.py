"""Texts that many callers ask for: made one at a time, once for all that wait, and sent in parts.

A text takes processor time, be it in a thread, and callers who ask for texts are not counted by their tokens' limits.
So hundreds of calls at a time would hold up the tokens of all streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PART_BYTES: Final = 64 * 1024


class SharedTexts:
    """The texts of one server. It belongs to one event loop, and keeps no text when nobody waits."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._num_begun = 0
        self._newest: dict[Hashable, tuple[int, bytes]] = {}
        """By key, the newest text and its number. Texts are numbered in the order in which they were begun."""

    async def get(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return a text that was begun after this call; if another caller has made one since, that one.

        key:  tells apart texts that differ by who asks
        make: makes the text of this key
        """
        before = self._num_begun
        self._num_waiting += 1
        try:
            async with self._turn:
                number, text = self._newest.get(key, (0, b""))
                if number <= before:
                    number = self._num_begun = self._num_begun + 1
                    text = await make()
                    self._newest[key] = number, text
                return text
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._newest.clear()


class SharedTextResponse(Response):
    """An answer whose text others get as well: a client that does not read it costs a part of it, and no copy."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the text in parts, each once the client has read most of those before it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), _PART_BYTES):
            part = bytes(self.body[begin : begin + _PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
