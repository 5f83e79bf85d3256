"""A connected socket as a link uses it: it moves whole buffers up to a deadline, and can be aborted from any thread."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.trust.tls_socket import TlsSocket

_MAX_BUFFERS: Final = 512
"""The most buffers of one system call; Linux allows 1024."""


class ByteStream:
    """A connected socket, with TLS or without. All calls but is_cut() and abort() come from one thread.

    deadline_s: monotonic
    """

    def __init__(self, connection: socket.socket | TlsSocket) -> None:
        self._connection = connection
        # abort() must not hit a descriptor that close() has given back.
        self._lock = threading.Lock()

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        """Send all bytes of all buffers. Raises ChunkTimeout, LinkLost."""
        connection = self._connection
        if isinstance(connection, TlsSocket):
            self._move(list(buffers), deadline_s, lambda waiting: connection.send(waiting[0]))
        else:
            self._move(list(buffers), deadline_s, connection.sendmsg)

    def receive(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        """Fill all buffers. Raises ChunkTimeout, LinkLost."""
        connection = self._connection
        if isinstance(connection, TlsSocket):
            self._move(list(buffers), deadline_s, lambda waiting: connection.recv_into(waiting[0]))
        else:
            self._move(list(buffers), deadline_s, lambda waiting: connection.recvmsg_into(waiting)[0])

    def is_standing(self) -> bool:
        """Return whether neither end has closed the connection, without reading anything. Only for plain sockets."""
        connection = self._connection
        assert isinstance(connection, socket.socket), "only links over Unix sockets ask"
        try:
            connection.settimeout(0)
            return bool(connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_cut(self) -> bool:
        """Return whether the connection is known to be gone; from any thread, without any effect on the stream."""
        with self._lock:
            if self._connection.fileno() < 0:
                return True
            poll = select.poll()
            poll.register(self._connection, select.POLLRDHUP)
            return bool(poll.poll(0))

    def abort(self) -> None:
        """Shut the connection down, from any thread: calls that wait at either end fail."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the peer reads the end of the stream."""
        with self._lock:
            self._connection.close()

    def _move(self, waiting: list[memoryview], deadline_s: float, call: Callable[[list[memoryview]], int]) -> None:
        first = 0
        waiting = [buffer for buffer in waiting if buffer.nbytes]
        while first < len(waiting):
            num_bytes = self._call(waiting[first : first + _MAX_BUFFERS], deadline_s, call)
            while first < len(waiting) and num_bytes >= waiting[first].nbytes:
                num_bytes -= waiting[first].nbytes
                first += 1
            if num_bytes:
                waiting[first] = waiting[first][num_bytes:]

    def _call(self, waiting: list[memoryview], deadline_s: float, call: Callable[[list[memoryview]], int]) -> int:
        left_s = deadline_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._connection.settimeout(left_s)
            num_bytes = call(waiting)
        except TimeoutError as error:
            raise ChunkTimeout("a chunk did not move before its deadline") from error
        except OSError as error:
            raise LinkLost(f"the data connection broke: {error}") from error
        if num_bytes == 0:
            raise LinkLost("the data connection was closed")
        return num_bytes
