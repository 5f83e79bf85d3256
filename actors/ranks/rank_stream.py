"""The stream of messages between rank 0 of an engine and a further rank, with or without TLS.

Each message is sent as its length (8 bytes, big-endian) and its bytes. One thread receives; any thread may send.
Sending has a timeout. Receiving has none: it ends with a message or when the other end is gone.
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
"""The size of the largest message that is accepted: about a hundred times that of the largest step."""
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
        """Use TLS from now on, if the cluster uses TLS. Has to be called before anything is sent or received.

        Returns the socket on which the parties prove themselves. Raises NotRaypd if the TLS handshake fails.
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
        """Send one message. Safe from any thread."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message has {len(message)} bytes, more than {MAX_MESSAGE_BYTES}")
        with self._lock:
            self._peer.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytearray:
        """Wait for the next message, without a timeout."""
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message has {size} bytes, more than {MAX_MESSAGE_BYTES}")
        message = self._receive_exactly(min(size, _PIECE_BYTES))
        while len(message) < size:
            # Memory grows with the bytes that have arrived, so a false length alone allocates nothing.
            message += self._receive_exactly(min(size - len(message), len(message)))
        return message

    def hang_up(self) -> None:
        """Shut the connection down, which wakes the threads that receive at both ends. Safe from any thread."""
        self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. Only the thread that receives may call this."""
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
                    raise  # The kernel's keepalive timeout: the host at the other end is gone.
                continue  # TlsSocket applies its timeout to receiving too, but an engine may be idle for longer.
            if num_bytes == 0:
                raise EOFError
            waiting = waiting[num_bytes:]
        return message


def _timeval(timeout_s: float) -> bytes:
    seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
    return struct.pack("ll", seconds, microseconds)
