"""One rank's connection to another rank of its engine, as tensors move on it: with and without TLS alike."""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from kv_transfer.trust.tls_socket import TlsSocket


class RankPeer(Protocol):
    """A connection that one thread uses. A wait raises OSError once it has taken as long as set_timeout() allows."""

    def send(self, message: memoryview | bytes) -> None:
        """Send the whole message."""
        ...

    def receive_into(self, message: memoryview) -> None:
        """Fill the whole buffer."""
        ...

    def try_send(self, message: memoryview) -> int:
        """Send what can be sent without waiting; returns how many bytes."""
        ...

    def try_receive_into(self, message: memoryview) -> int:
        """Fill what can be filled without waiting; returns how many bytes. Raises ConnectionError at the end.

        After 0 the descriptor tells when there is more; before, some may be here already.
        """
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit of every later message, in seconds."""
        ...

    def fileno(self) -> int:
        """Return the descriptor."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def as_peer(connection: socket.socket | TlsSocket, timeout_s: float) -> RankPeer:
    """Take over a connection whose two ends have authenticated each other; timeout_s limits every wait."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer: RankPeer = _TlsPeer(connection) if isinstance(connection, TlsSocket) else _PlainPeer(connection)
    peer.set_timeout(timeout_s)
    return peer


class _PlainPeer:
    """A connection without TLS. The kernel enforces the timeout, so that a small message takes one system call."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection

    def send(self, message: memoryview | bytes) -> None:
        self._connection.sendall(message)

    def receive_into(self, message: memoryview) -> None:
        while message:
            # One call is normally enough: only a signal makes recv_into() return before all bytes have come.
            message = message[_not_at_end(self._connection.recv_into(message, len(message), socket.MSG_WAITALL)) :]

    def try_send(self, message: memoryview) -> int:
        try:
            return self._connection.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def try_receive_into(self, message: memoryview) -> int:
        try:
            return _not_at_end(self._connection.recv_into(message, len(message), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return 0

    def set_timeout(self, timeout_s: float) -> None:
        seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


class _TlsPeer:
    def __init__(self, connection: TlsSocket) -> None:
        self._connection = connection

    def send(self, message: memoryview | bytes) -> None:
        self._connection.sendall(message)

    def receive_into(self, message: memoryview) -> None:
        while message:
            message = message[_not_at_end(self._connection.recv_into(message)) :]

    def try_send(self, message: memoryview) -> int:
        return self._connection.try_send(message)

    def try_receive_into(self, message: memoryview) -> int:
        num_bytes = self._connection.try_recv_into(message)
        return 0 if num_bytes is None else _not_at_end(num_bytes)

    def set_timeout(self, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def _not_at_end(num_bytes: int) -> int:
    if num_bytes == 0:
        raise ConnectionError("the rank at the other end has closed the connection")
    return num_bytes
