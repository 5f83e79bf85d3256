"""Receives the messages of calls: after the token was checked, a few at a time, and within a time limit.

gRPC would receive the message of a call before any of raypd's code runs, and could hold max_message_bytes for each of
thousands of calls. A handler of a stream of requests receives a message when it asks for one. So every method has such
a handler, and a message that was not asked for stays with its sender, apart from HTTP/2's window of 64 KiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from cluster.api.grpc.sender_turns import SenderTurns
from cluster.api.grpc.wire import MAX_UNCOUNTED_BYTES, decode_in_slices, refusal_of_undecodable
from cluster.errors import FieldViolation, InvalidRequest

MAX_AT_ONCE: Final = 8
"""The most messages that are received at the same time for one token, or for one connection where there are none."""
TIMEOUT_S: Final = 30.0
MAX_OPEN_AT_ONCE: Final = 4
"""The most messages that are received at the same time from one host, of calls that need no token."""
OPEN_TIMEOUT_S: Final = 5.0
MAX_OPEN_MESSAGE_BYTES: Final = 4096
"""The largest message of a call that needs no token; such messages have no more than a name in them."""

Decode = Callable[[bytes], Any]
_Context = grpc.aio.ServicerContext[Any, Any]


class Receiving:
    """Receives the messages of one server's calls, a few of each sender at a time. It belongs to one event loop."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE, timeout_s: float = TIMEOUT_S) -> None:
        """Set the limits.

        max_at_once: the most messages of one sender that are received at the same time
        timeout_s:   how long one message may take, in seconds, without the wait for its turn
        """
        self._timeout_s = timeout_s
        self._turns = SenderTurns(max_at_once)

    async def receive(self, sender: str, context: _Context, descriptor: Descriptor, decode: Decode) -> Any:
        """Receive and decode the one message of a call.

        Raises InvalidRequest if the message is missing, late, not of this type, or has too many entries.
        """
        async with self._turns.turn(sender):
            data = await self._read(context)
            if data is None:
                raise _refusal("missing", "a message of the method's type")
            if len(data) <= MAX_UNCOUNTED_BYTES:
                return _decoded(data, decode)
            await asyncio.sleep(0)  # gRPC has copied the message: other calls get a turn before it is decoded,
            message = await decode_in_slices(descriptor, data)
            await asyncio.sleep(0)  # and before it is processed.
            return message

    async def receive_small(self, sender: str, context: _Context, decode: Decode) -> Any:
        """Receive and decode the one message of a call that needs no token. Raises InvalidRequest."""
        async for message in self.receive_all_small(sender, context, decode):
            return message
        raise _refusal("missing", "a message of the method's type")

    async def receive_all_small(self, sender: str, context: _Context, decode: Decode) -> AsyncIterator[Any]:
        """Receive and decode the messages of a call that needs no token. Raises InvalidRequest."""
        while True:
            async with self._turns.turn(sender):
                data = await self._read(context)
            if data is None:
                return
            if len(data) > MAX_OPEN_MESSAGE_BYTES:
                raise _refusal(f"{len(data)} bytes", f"at most {MAX_OPEN_MESSAGE_BYTES} bytes")
            yield _decoded(data, decode)

    async def _read(self, context: _Context) -> bytes | None:
        """Return the next message; None if no further one comes. Raises InvalidRequest if it takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await context.read()
        except TimeoutError:
            raise _refusal("incomplete", f"a message that arrives within {self._timeout_s:g} s") from None
        return data if isinstance(data, bytes) else None


def _decoded(data: bytes, decode: Decode) -> Any:
    try:
        return decode(data)
    except DecodeError as error:
        raise refusal_of_undecodable(len(data), error) from error


def _refusal(shown: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("request", shown, allowed))
