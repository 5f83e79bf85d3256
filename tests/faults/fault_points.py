"""Faults inside an engine's process: what happens, where on the way of a chunk, and to which chunk.

One fault is armed at a time, fires once and says so first. The links, streams and sockets that it needs to get at are
wrapped here; the product knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from kv_transfer.agent import TransferAgent
from kv_transfer.control import ControlStream, StreamEvents
from kv_transfer.grpc_control import GrpcControl, GrpcStream
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import ComputeEvent, DataLink, PendingLink, Transport
from kv_transfer.transports.byte_stream import ByteStream
from kv_transfer.wire import ControlMessage, Ready

_RELEASE_TIMEOUT_S: Final = 30.0
_SMALLEST_PAYLOAD_SIZE_BYTES: Final = 1024
"""Blocks are larger, headers and acknowledgements are smaller."""

T = TypeVar("T")


class Point(Enum):
    """Where a fault happens."""

    DIALLING = auto()
    """A consumer is about to dial."""
    LISTENING = auto()
    """A producer was dialled and opens a link."""
    SAYING_READY = auto()
    """A consumer is about to say READY, on a link that may be open."""
    HEARING_READY = auto()
    """It has come to the producer, which knows nothing of it yet."""
    BEFORE_CHUNK = auto()
    """It is announced."""
    INSIDE_CHUNK = auto()
    """Half of its bytes are on the way or in place; or it is named, and not yet copied."""
    AFTER_CHUNK = auto()


class Action(Enum):
    """What happens to the process, or is done by it."""

    KILL = auto()
    STOP = auto()
    HOLD = auto()
    """The thread waits there until the test lets it go on."""
    CUT_DATA = auto()
    CUT_CONTROL = auto()
    FLIP = auto()
    """A bit of the chunk, at its consumer, after it has come."""


@dataclass(frozen=True, slots=True)
class Fault:
    """chunk: counted from 1 over all links, from the moment the fault is armed. peer: whose control stream is cut."""

    action: Action
    point: Point
    chunk: int = 1
    peer: str = ""


class FaultPoints:
    """Called from every thread of the engine. fired: where the test hears of it. link_kinds: of links opened so far."""

    def __init__(self, fired: Connection) -> None:
        self._fired = fired
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._num_chunks = 0
        self._here = threading.local()
        self._is_released = threading.Event()
        self._is_control_closed = threading.Event()
        self.link_kinds: list[str] = []

    def arm(self, fault: Fault) -> None:
        """Let this one happen next."""
        with self._lock:
            self._fault, self._num_chunks = fault, 0
            self._is_released.clear()

    def disarm(self) -> bool:
        """Let nothing happen any more; whether something would have."""
        with self._lock:
            fault, self._fault = self._fault, None
        return fault is not None

    def release(self) -> None:
        """End a HOLD."""
        self._is_released.set()

    def begin_chunk(self) -> int:
        """The chunk's number, to be given to reach() along the way of it."""
        with self._lock:
            self._num_chunks += 1
            return self._num_chunks

    def open_link(self, link: DataLink) -> FaultyLink:
        """Wrap a link that has been opened."""
        self.link_kinds.append(type(link).__name__)
        return FaultyLink(link, self)

    def reach(self, point: Point, chunk: int = 1, flip: Callable[[], None] = lambda: None) -> None:
        """This thread is at this point. flip: how a bit of the chunk is flipped."""
        with self._lock:
            fault = self._fault
            if fault is None or (fault.point, fault.chunk) != (point, chunk):
                return
            self._fault = None
        self._fired.send(fault)
        self._happen(fault, flip)

    @contextlib.contextmanager
    def inside(self, chunk: int) -> Iterator[None]:
        """Mark what this thread does on its byte stream as a part of this chunk."""
        self._here.chunk, self._here.num_calls = chunk, 0
        try:
            yield
        finally:
            self._here.chunk = None

    def chunk_here(self) -> int | None:
        """Which chunk this thread moves now."""
        return getattr(self._here, "chunk", None)

    def count_call(self) -> int:
        """How many calls of its byte stream this thread has made for the chunk, this one included."""
        self._here.num_calls += 1
        return int(self._here.num_calls)

    def on_stream_made(self, cut: Callable[[], None]) -> None:
        """This thread's link has this byte stream from now on."""
        self._here.cut = cut

    def on_control_closed(self) -> None:
        """The agent has heard that a control stream is over."""
        self._is_control_closed.set()

    def _cut_control(self, peer: str) -> None:
        """Nothing more moves on this thread before the agent knows of it: the transfer is not through by then."""
        self._is_control_closed.clear()
        if cut_connections_to(peer):
            self._is_control_closed.wait(_RELEASE_TIMEOUT_S)

    def _happen(self, fault: Fault, flip: Callable[[], None]) -> None:
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.HOLD:
                self._is_released.wait(_RELEASE_TIMEOUT_S)
            case Action.CUT_DATA:
                self._here.cut()
            case Action.CUT_CONTROL:
                self._cut_control(fault.peer)
            case Action.FLIP:
                flip()


class FaultyLink:
    """A DataLink that passes by the points of each chunk."""

    def __init__(self, link: DataLink, points: FaultPoints) -> None:
        self._link = link
        self._points = points

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._move(lambda: self._link.send(blocks, timeout_s, after), blocks)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._move(lambda: self._link.receive(blocks, timeout_s, after), blocks)

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
        return self._points.open_link(self._pending.accept(*arguments))


class FaultyTransport:
    """A Transport whose links are FaultyLinks."""

    def __init__(self, transport: Transport, points: FaultPoints) -> None:
        self._transport = transport
        self._points = points
        self.name = transport.name

    def listen(self) -> PendingLink:
        self._points.reach(Point.LISTENING)
        return _FaultyPendingLink(self._transport.listen(), self._points)

    def connect(self, *arguments: Any) -> DataLink:
        return self._points.open_link(self._transport.connect(*arguments))


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


def cut_connections_to(address: str) -> int:
    """Shut down every TCP connection of this process to host:port, behind its owner's back; returns how many."""
    num_cut = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in {socket.AF_INET, socket.AF_INET6} and _peer_of(connection) == address:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut


def _flip_bit(block: Tensor) -> None:
    """The highest bit of a float32's exponent."""
    block.view(-1).view(torch.uint8)[3] ^= 0x40


def _peer_of(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"{str(host).removeprefix('::ffff:')}:{port}"


def _halves(buffers: Sequence[memoryview]) -> list[Sequence[memoryview]]:
    """The same bytes in two parts, cut inside of the middle buffer."""
    middle = len(buffers) // 2
    half = buffers[middle].nbytes // 2
    return [[*buffers[:middle], buffers[middle][:half]], [buffers[middle][half:], *buffers[middle + 1 :]]]
