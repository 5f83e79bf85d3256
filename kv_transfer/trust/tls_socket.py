"""A connected socket with TLS that behaves as a plain one does: one thread reads, another writes, any shuts it down.

OpenSSL's connections are not safe to read and write at once, and Python 3.11 does not guard them. So every call into
OpenSSL here is made under a lock and never blocks; what waits is a poll() of the descriptor, outside of the lock.

Invariant: a thread waits for the descriptor only after OpenSSL has said that it needs more of it. What OpenSSL has
decrypted already is never waited for.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")
_READABLE: Final = select.POLLIN | select.POLLRDHUP


class TlsSocket:
    """Has the methods of a socket that raypd's connections use. settimeout() counts for each call."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """connection: whose handshake is still to come. It belongs to this object from now on."""
        self._timeout_s = connection.gettimeout()
        connection.setblocking(False)
        self._connection = connection
        self._lock = threading.Lock()

    def handshake(self, deadline_s: float) -> None:
        """Complete the handshake. deadline_s: monotonic. Raises TimeoutError, ssl.SSLError or another OSError."""
        self._wait(self._connection.do_handshake, deadline_s)

    def send(self, data: memoryview | bytes) -> int:
        """Send some of the data; returns how many bytes."""
        return self._wait(lambda: self._connection.send(data), self._deadline_s())

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all of it before the timeout."""
        deadline_s, waiting = self._deadline_s(), memoryview(data).cast("B")
        while waiting:
            waiting = waiting[self._wait(lambda part=waiting: self._connection.send(part), deadline_s) :]  # type: ignore[misc]  # mypy infers no lambda with a default

    def recv(self, size: int) -> bytes:
        """Return some bytes, at most `size`; none at the end of the stream."""
        return self._wait(lambda: self._connection.recv(size), self._deadline_s())

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Fill some of the buffer; returns how many bytes, 0 at the end of the stream."""
        return self._wait(lambda: self._connection.recv_into(buffer), self._deadline_s())

    def try_send(self, data: memoryview) -> int:
        """Send what can be sent without waiting; returns how many bytes."""
        return self._try(lambda: self._connection.send(data)) or 0

    def try_recv_into(self, buffer: memoryview) -> int | None:
        """Fill what can be filled without waiting; returns how many bytes, None if there are none yet, 0 at the end."""
        return self._try(lambda: self._connection.recv_into(buffer))

    def settimeout(self, timeout_s: float | None) -> None:
        """Let each later call take so long; None: without end."""
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        """Return what settimeout() was last called with."""
        return self._timeout_s

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket below."""
        self._connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._connection.fileno()

    def shutdown(self, how: int) -> None:
        """Wake every thread that waits here, and the peer. From any thread, without TLS's farewell."""
        # Not SSLSocket's own, which would let a thread in the middle of a call go on in plain text.
        socket.socket.shutdown(self._connection, how)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._connection.close()

    def _deadline_s(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _try(self, call: Callable[[], _T]) -> _T | None:
        with self._lock, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return call()
        return None

    def _wait(self, call: Callable[[], _T], deadline_s: float | None) -> _T:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = _READABLE
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            self._poll(event, deadline_s)

    def _poll(self, event: int, deadline_s: float | None) -> None:
        """Wait until the descriptor is ready, or at its end."""
        if (fd := self._connection.fileno()) < 0:
            raise ConnectionAbortedError("the TLS connection was closed here")
        poll = select.poll()
        poll.register(fd, event)
        left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError("the TLS connection did not move in time")
