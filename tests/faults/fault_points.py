"""Faults inside an engine's process: what happens, where on the way of a chunk, and to which chunk.

One fault is armed at a time, fires once and says so first. faulty_parts.py lets the engine's parts pass by the points.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

_RELEASE_TIMEOUT_S: Final = 30.0


class Point(Enum):
    """The moment at which a fault happens."""

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
    """The thing that happens to the process, or is done by it."""

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
        """The number of the chunk that this thread moves now."""
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


def _peer_of(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"{str(host).removeprefix('::ffff:')}:{port}"
