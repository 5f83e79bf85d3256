"""HTTP/2 by hand: calls that a gRPC library would not make, such as messages that never end."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from typing import Final, Self

from tests.attacks.target import Target

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_WINDOW: Final = 65_535
_MAX_FRAME: Final = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(path: str, token: str = "") -> bytes:
    """Encode the headers that begin a call, as HPACK without a table."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "127.0.0.1",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        headers["authorization"] = f"Bearer {token}"
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers.items())


def message_head(num_bytes: int) -> bytes:
    """Encode what comes before a message of so many bytes."""
    return struct.pack(">BI", 0, num_bytes)


class Connection:
    """Counts what it may send, by stream and in all, as the other side says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._last_stream = -1
        self._initial_window = _WINDOW
        self._windows: dict[int, int] = defaultdict(int)
        self._windows[0] = _WINDOW
        self._change = asyncio.Event()
        self.num_sent = 0
        self.ended: set[int] = set()
        """Streams that the other side has ended."""
        self.is_over = False

    @classmethod
    async def open(cls, target: Target, settings: bytes = b"", *, is_read: bool = True) -> Self:
        """settings: of the client, each two bytes of its number and four of its value

        is_read: whether what the server sends is taken
        """
        connection = cls(*await target.connect_grpc())
        connection.write(_PREFACE + frame(SETTINGS, 0, 0, settings))
        connection._reading = asyncio.create_task(connection._read() if is_read else asyncio.sleep(0))
        return connection

    _reading: asyncio.Task[None]

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.transport.abort()

    def write(self, data: bytes) -> None:
        if not self.is_over:
            self._writer.write(data)

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError:
            self.is_over = True

    def begin(self, path: str, token: str = "", headers: bytes = b"") -> int:
        """Begin a call; returns its stream. headers: instead of those that a call begins with"""
        self._last_stream += 2
        stream = self._last_stream
        self._windows[stream] = self._initial_window
        self.write(frame(HEADERS, END_HEADERS, stream, headers or call_headers(path, token)))
        return stream

    async def until_ended(self, stream: int, timeout_s: float) -> None:
        """Wait until the other side has ended a stream."""
        async with asyncio.timeout(timeout_s):
            while stream not in self.ended and not self.is_over:
                self._change.clear()
                await self._change.wait()

    async def send(self, stream: int, data: bytes, timeout_s: float) -> int:
        """Send as much as is taken within this time, or until the stream ends; returns how much it was."""
        num_sent = 0
        try:
            async with asyncio.timeout(timeout_s):
                while num_sent < len(data) and stream not in self.ended and not self.is_over:
                    length = min(len(data) - num_sent, self._windows[0], self._windows[stream], _MAX_FRAME)
                    if length <= 0:
                        self._change.clear()
                        await self._change.wait()
                        continue
                    self._windows[0] -= length
                    self._windows[stream] -= length
                    self.write(frame(DATA, 0, stream, data[num_sent : num_sent + length]))
                    num_sent += length
                    await self.drain()
        except TimeoutError:
            pass
        self.num_sent += num_sent
        return num_sent

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload)
        except (OSError, asyncio.IncompleteReadError):
            self.is_over = True
            self._change.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for known in self._windows:
                        self._windows[known] += (value - self._initial_window) if known else 0
                    self._initial_window = value
            self.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)
        self._change.set()


def _string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    length, more = len(data) - 127, b""
    while length >= 128:
        more += bytes([length & 127 | 128])
        length >>= 7
    return b"\x7f" + more + bytes([length]) + data
