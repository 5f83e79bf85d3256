"""Parts of an engine that pass by the points of fault_points.py. The product knows nothing of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.handoff.control_messages import ControlMessage, Ready
from kv_transfer.links.control_streams import ControlStream, StreamEvents
from kv_transfer.links.grpc_control import GrpcControl, GrpcStream
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import ComputeEvent, DataLink, PendingLink, Transport
from kv_transfer.transports.byte_stream import ByteStream
from kv_transfer.trust.secret import KeySource
from tests.faults.fault_points import FaultPoints, Point

_SMALLEST_PAYLOAD_SIZE_BYTES: Final = 1024
"""Blocks are larger, headers and acknowledgements are smaller."""

T = TypeVar("T")


class FaultyLink:
    """A DataLink that passes by the points of each chunk."""

    def __init__(self, link: DataLink, points: FaultPoints) -> None:
        self._link = link
        self._points = points

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._move(lambda: self._link.send(blocks, timeout_s, after), blocks)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._move(lambda: self._link.receive(blocks, timeout_s, after), blocks)

    def is_cut(self) -> bool:
        return self._link.is_cut()

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()

    def _move(self, move: Callable[[], None], blocks: Sequence[Tensor]) -> None:
        chunk = self._points.begin_chunk()
        self._points.reach(Point.BEFORE_CHUNK, chunk)
        with self._points.inside(chunk):
            move()
        self._points.reach(Point.AFTER_CHUNK, chunk, lambda: _flip_bit(blocks[-1]))


class _FaultyPendingLink:
    def __init__(self, pending: PendingLink, points: FaultPoints) -> None:
        self._pending = pending
        self._points = points
        self.rendezvous = pending.rendezvous

    def accept(self, *arguments: Any) -> DataLink:
        return _faulty(self._pending.accept(*arguments), self._points)


class FaultyTransport:
    """A Transport whose links are FaultyLinks."""

    def __init__(self, transport: Transport, points: FaultPoints) -> None:
        self._transport = transport
        self._points = points
        self.name = transport.name

    def listen(self, key: KeySource | None = None) -> PendingLink:
        self._points.reach(Point.LISTENING)
        return _FaultyPendingLink(self._transport.listen(key), self._points)

    def connect(self, *arguments: Any) -> DataLink:
        return _faulty(self._transport.connect(*arguments), self._points)


def faulty_streams(points: FaultPoints) -> type[ByteStream]:
    """A ByteStream that can break in the middle of a chunk: inside its payload, or between two of its messages."""

    class FaultyByteStream(ByteStream):
        def __init__(self, connection: socket.socket) -> None:
            super().__init__(connection)
            points.on_stream_made(self._cut)

        def _cut(self) -> None:
            """End the connection, and lose what has come and was not read."""
            self.abort()
            with contextlib.suppress(OSError):
                while self._connection.recv(1 << 16):
                    pass

        def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
            for part in self._parts(buffers):
                super().send(part, deadline_s)

        def receive(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
            for part in self._parts(buffers):
                super().receive(part, deadline_s)

        def _parts(self, buffers: Sequence[memoryview]) -> Iterable[Sequence[memoryview]]:
            chunk = points.chunk_here()
            if chunk is None:
                yield buffers
                return
            halves = [buffers] if sum(b.nbytes for b in buffers) < _SMALLEST_PAYLOAD_SIZE_BYTES else _halves(buffers)
            if points.count_call() > 1 and len(halves) == 1:
                points.reach(Point.INSIDE_CHUNK, chunk)
            yield halves[0]
            for half in halves[1:]:
                points.reach(Point.INSIDE_CHUNK, chunk)
                yield half

    return FaultyByteStream


def faulty_control(points: FaultPoints) -> type[GrpcControl]:
    """A GrpcControl whose dialling is a point, and each READY on a stream that it dials."""

    class FaultyControl(GrpcControl):
        def dial(self, peer: EngineAddress, events: StreamEvents) -> GrpcStream:
            points.reach(Point.DIALLING)
            stream = super().dial(peer, events)
            send = stream.send

            def pass_by_and_send(message: ControlMessage) -> None:
                if isinstance(message, Ready):
                    points.reach(Point.SAYING_READY)
                send(message)

            return with_attribute(stream, "send", pass_by_and_send)

    return FaultyControl


def faulty_agent(points: FaultPoints) -> type[TransferAgent]:
    """A TransferAgent to whom each READY that comes is a point, and who says when control streams are over."""

    class FaultyAgent(TransferAgent):
        def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
            if isinstance(message, Ready):
                points.reach(Point.HEARING_READY)
            super().on_message(stream, message)

        def on_closed(self, stream: ControlStream, reason: str) -> None:
            super().on_closed(stream, reason)
            points.on_control_closed()

    return FaultyAgent


def with_attribute(target: T, name: str, value: object) -> T:
    """Put something else in the place of one object's method."""
    setattr(target, name, value)
    return target


def _faulty(link: DataLink, points: FaultPoints) -> FaultyLink:
    points.link_kinds.append(type(link).__name__)
    return FaultyLink(link, points)


def _flip_bit(block: Tensor) -> None:
    """The highest bit of a float32's exponent."""
    block.view(-1).view(torch.uint8)[3] ^= 0x40


def _halves(buffers: Sequence[memoryview]) -> list[Sequence[memoryview]]:
    """The same bytes in two parts, cut inside of the middle buffer."""
    middle = len(buffers) // 2
    half = buffers[middle].nbytes // 2
    return [[*buffers[:middle], buffers[middle][:half]], [buffers[middle][half:], *buffers[middle + 1 :]]]
