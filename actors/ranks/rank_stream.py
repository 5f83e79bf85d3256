"""The stream of messages between rank 0 of an engine and a further rank, with or without TLS.

Each message follows its length. One thread receives; any thread may send. Receiving waits for as long as the other end
lives; sending has a timeout.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
from typing import Final

from kv_transfer.errors import NotRaypd
from kv_transfer.trust.tls import InternalTls, shake_hands
from kv_transfer.trust.tls_socket import TlsSocket

# TCP keepalive detects a peer whose host is gone after about _KEEPALIVE_S * (_NUM_KEEPALIVES + 1) seconds.
_KEEPALIVE_S: Final = 3
_NUM_KEEPALIVES: Final = 3
_LENGTH: Final = struct.Struct("!Q")
MAX_MESSAGE_BYTES: Final = 2**30
"""Largest message: a step with all its new requests, a hundred times the size of the largest real one."""
_PIECE_BYTES: Final = 2**20


class RankStream:
    """One end of a stream. Its methods raise OSError when the connection fails, and EOFError at the stream's end."""

    def __init__(self, peer: socket.socket, timeout_s: float) -> None:
        """timeout_s: how long a full stream may block a sender."""
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        self._timeout_s = timeout_s
        self._peer: socket.socket | TlsSocket = peer
        self._lock = threading.Lock()

    def encrypt(self, tls: InternalTls | None, *, is_dialler: bool, deadline_s: float) -> socket.socket | TlsSocket:
        """Use TLS from now on, if the cluster has it; returns the socket on which the parties prove themselves.

        Comes before anything is sent or received. Raises NotRaypd if no TLS connection comes about.
        """
        if tls is not None:
            assert isinstance(self._peer, socket.socket), "a stream is encrypted once"
            try:
                self._peer = encrypted = (tls.dialling if is_dialler else tls.accepting)(self._peer)
                encrypted.settimeout(self._timeout_s)
                shake_hands(encrypted, deadline_s)
            except OSError as error:
                raise NotRaypd(f"no TLS connection came about: {error}") from error
        return self._peer

    def send(self, message: bytes) -> None:
        """Send one message; from any thread."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message of {len(message)} bytes, the most is {MAX_MESSAGE_BYTES}")
        with self._lock:
            self._peer.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytearray:
        """Wait for the next message, for as long as the other end lives."""
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message of {size} bytes, the most is {MAX_MESSAGE_BYTES}")
        message = self._receive_exactly(min(size, _PIECE_BYTES))
        while len(message) < size:
            # A message's memory grows with the bytes that came: its length alone allocates nothing.
            message += self._receive_exactly(min(size - len(message), len(message)))
        return message

    def hang_up(self) -> None:
        """Wake the threads that receive, at both ends; from any thread."""
        self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; only from the thread that receives."""
        self._peer.close()

    def _receive_exactly(self, size: int) -> bytearray:
        message = bytearray(size)
        waiting = memoryview(message)
        while waiting:
            try:
                num_bytes = self._peer.recv_into(waiting)
            except ssl.SSLEOFError:
                raise EOFError from None
            except TimeoutError as error:
                if error.errno is not None:
                    raise  # The kernel's timeout: the host at the other end is gone.
                continue  # TlsSocket's timeout holds for receiving too, and an engine may be idle for longer.
            if num_bytes == 0:
                raise EOFError
            waiting = waiting[num_bytes:]
        return message


def _timeval(timeout_s: float) -> bytes:
    seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
    return struct.pack("ll", seconds, microseconds)
