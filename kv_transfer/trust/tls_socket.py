"""A connected TLS socket that behaves as a plain one: one thread reads, one writes, and any thread may shut it down.

An OpenSSL connection must not be read and written at the same time, and Python 3.11 does not guard it. So OpenSSL works
on memory here, under a lock, and never blocks. Plain calls of the socket move the bytes on the wire, outside the lock,
many records at a time. With OpenSSL on the socket itself each record of 16 KiB took two calls to receive.

Invariants: a thread waits for the descriptor only if no received bytes are left; encrypted bytes are sent before
anything else is encrypted; and bytes count as sent once the kernel has taken all of their records.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

_T = TypeVar("_T")
_READABLE: Final = select.POLLIN | select.POLLRDHUP
_RECEIVED_AT_ONCE: Final = 256 * 1024
"""The most bytes of one call of the socket: many records, so few calls, but no more than a processor's cache holds."""
_ENCRYPTED_AT_ONCE: Final = 64 * 1024


class TlsSocket:
    """A connected socket with TLS, with those methods of a socket that raypd uses. The timeout counts for each call."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None) -> None:
        """Take over a connection before its TLS handshake; the given socket object can no longer be used.

        server_hostname: the name that the other end's certificate is for; None for the end that accepted
        """
        self._timeout_s = connection.gettimeout()
        family, kind, protocol = connection.family, connection.type, connection.proto
        self._connection = socket.socket(family, kind, protocol, connection.detach())
        self._connection.setblocking(False)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._lock = threading.Lock()
        self._received = memoryview(bytearray(_RECEIVED_AT_ONCE))
        self._encrypted = memoryview(b"")
        """Encrypted bytes that the kernel has not taken yet."""
        self._num_encrypted = 0
        """How many of the caller's bytes _encrypted stands for."""

    def handshake(self, deadline_s: float) -> None:
        """Complete the handshake. deadline_s: monotonic. Raises TimeoutError, ssl.SSLError or another OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline_s)
            except ssl.SSLError:
                # The alert that OpenSSL has written tells the other end why the handshake failed.
                with contextlib.suppress(OSError):
                    self._flush(deadline_s)
                raise
            else:
                return self._flush(deadline_s)
            if not self._wait(self._receive, _READABLE, deadline_s):
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "the other end closed the connection")

    def send(self, data: memoryview | bytes) -> int:
        """Send some of the data; return how many bytes. After a timeout the connection is shut down."""
        return self._send_until(data, self._deadline_s())

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all of the data before the timeout, after which the connection is shut down."""
        deadline_s, waiting = self._deadline_s(), memoryview(data).cast("B")
        while waiting:
            waiting = waiting[self._send_until(waiting, deadline_s) :]

    def recv(self, size: int) -> bytes:
        """Wait for bytes, and return at most `size` of them; none at the end of the stream."""
        buffer = memoryview(bytearray(size))
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Wait for bytes, and fill some of the buffer; return how many bytes, 0 at the end of the stream."""
        return self._wait(lambda: self._decrypt(buffer), _READABLE, self._deadline_s())

    def try_send(self, data: memoryview) -> int:
        """Send as much as can be sent without waiting; return how many bytes.

        After 0 the next call that sends must have the same data: a part of them may have been sent.
        """
        try:
            return self._send(data)
        except BlockingIOError:
            return 0

    def try_recv_into(self, buffer: memoryview) -> int | None:
        """Fill as much as possible without waiting; return how many bytes, None if there are none yet, 0 at the end."""
        try:
            return self._decrypt(buffer)
        except BlockingIOError:
            return None

    def settimeout(self, timeout_s: float | None) -> None:
        """Set how long each later call may take; None: without a limit."""
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        """Return what settimeout() was last called with."""
        return self._timeout_s

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the underlying socket."""
        self._connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._connection.fileno()

    def shutdown(self, how: int) -> None:
        """Shut the connection down, from any thread, without TLS's closing alert: calls that wait at both ends end."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._connection.close()

    def _send(self, data: memoryview | bytes) -> int:
        """Encrypt and send some of the data without waiting; return how many bytes. One thread at a time calls this.

        Raises BlockingIOError while the kernel has no room for all encrypted bytes; the next call must have the same
        data.
        """
        if not self._num_encrypted:
            with self._lock:
                self._num_encrypted = self._encrypt(memoryview(data).cast("B")[:_ENCRYPTED_AT_ONCE])
                self._encrypted = memoryview(self._outgoing.read())
        while self._encrypted:
            self._encrypted = self._encrypted[self._connection.send(self._encrypted) :]
        num_bytes, self._num_encrypted = self._num_encrypted, 0
        return num_bytes

    def _encrypt(self, data: memoryview) -> int:
        num_bytes = 0
        while num_bytes < len(data):
            num_bytes += self._tls.write(data[num_bytes:])
        return num_bytes

    def _send_until(self, data: memoryview | bytes, deadline_s: float | None) -> int:
        try:
            return self._wait(lambda: self._send(data), select.POLLOUT, deadline_s)
        except TimeoutError:
            # A part of the data may have been sent; it must not become the beginning of other data.
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)
            raise

    def _decrypt(self, buffer: memoryview | bytearray) -> int:
        """Fill some of the buffer without waiting; return how many bytes, 0 at the end. One thread at a time calls it.

        Raises BlockingIOError if no received bytes are left.
        """
        waiting, filled = memoryview(buffer).cast("B"), 0
        while True:
            with self._lock, contextlib.suppress(ssl.SSLWantReadError):
                while filled < len(waiting) and (num_bytes := self._tls.read(len(waiting), waiting[filled:])):
                    filled += num_bytes  # type: ignore[operator]  # a number, since there is a buffer
                return filled
            if filled or not self._receive():
                return filled

    def _receive(self) -> int:
        """Take received bytes from the kernel; return how many, 0 at the end. Raises BlockingIOError if it has none."""
        num_bytes = self._connection.recv_into(self._received)
        with self._lock:
            self._incoming.write(self._received[:num_bytes])
        return num_bytes

    def _flush(self, deadline_s: float) -> None:
        """Send the handshake's outgoing bytes before the deadline."""
        waiting = memoryview(self._outgoing.read())
        while waiting:
            waiting = waiting[self._wait(partial(self._connection.send, waiting), select.POLLOUT, deadline_s) :]

    def _deadline_s(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(self, call: Callable[[], _T], event: int, deadline_s: float | None) -> _T:
        """Call `call` whenever the descriptor is ready, until it does not raise BlockingIOError; return its result."""
        while True:
            with contextlib.suppress(BlockingIOError):
                return call()
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
