"""A TCP proxy that can fall silent: what it is given is taken, and goes nowhere, and nobody is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final, Self

_MAX_READ_SIZE_BYTES: Final = 1 << 16


class SwallowingProxy:
    """Between whoever connects to `address` and a port of this host. A context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_swallowing = threading.Event()
        self._num_bytes_left: int | None = None
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="proxy")]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60.0)
        self.cut()
        for thread in self._threads[1:]:
            thread.join(60.0)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def swallow(self) -> None:
        """From now on nothing passes, in either direction, on any connection."""
        self._is_swallowing.set()

    def swallow_after(self, num_bytes: int) -> None:
        """Let so many more bytes pass."""
        with self._lock:
            self._num_bytes_left = num_bytes

    def heal(self) -> None:
        """Let everything pass again that comes from now on."""
        with self._lock:
            self._num_bytes_left = None
        self._is_swallowing.clear()

    def cut(self) -> None:
        """End every connection, which both of its ends hear of."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._connections += [near, far]
                for source, sink in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pump, args=(source, sink), name="proxy-pump")
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_MAX_READ_SIZE_BYTES):
                sink.sendall(self._passing(data))
        with contextlib.suppress(OSError):
            # Its end is a word too: it is swallowed with the others.
            if not self._is_swallowing.is_set():
                sink.shutdown(socket.SHUT_WR)

    def _passing(self, data: bytes) -> bytes:
        with self._lock:
            if self._num_bytes_left is not None:
                data = data[: self._num_bytes_left]
                self._num_bytes_left -= len(data)
                if not self._num_bytes_left:
                    self._is_swallowing.set()
                return data
        return b"" if self._is_swallowing.is_set() else data
