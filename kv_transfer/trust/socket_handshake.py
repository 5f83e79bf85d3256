"""The handshake over a connected socket: each message has its length in front, and all share one deadline.

Nothing is read beyond the handshake's last byte, so the peer's next bytes stay in the socket. handshake.py has the
messages.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

from kv_transfer.errors import HungUp, NotRaypd, Untrusted
from kv_transfer.trust.handshake import MAX_MESSAGE_BYTES, Acceptor, Dialer, Proven, refusal
from kv_transfer.trust.tls_socket import TlsSocket

_LENGTH: Final = struct.Struct("!H")
_TLS_LENGTHS: Final = (0x1503, 0x1603)
"""The first two bytes of a TLS alert and of a TLS handshake, read as a length, which no message has."""


def dial_proof(connection: socket.socket | TlsSocket, dialer: Dialer, deadline_s: float) -> Proven:
    """Prove this end, which dialled, and check the other end's proof. deadline_s: monotonic

    The socket's timeout is restored. The caller closes the connection, also after an error. Raises Untrusted.
    """
    with _as_untrusted(connection):
        _send(connection, dialer.challenge, deadline_s)
        proof, proven = dialer.prove(_receive(connection, deadline_s))
        _send(connection, proof, deadline_s)
    return proven


def accept_proof(connection: socket.socket | TlsSocket, acceptor: Acceptor, deadline_s: float) -> Proven:
    """Prove this end, which accepted the connection, and check the other end's proof, as dial_proof() does."""
    with _as_untrusted(connection):
        try:
            _send(connection, acceptor.answer(_receive(connection, deadline_s)), deadline_s)
        except Untrusted:
            with contextlib.suppress(OSError):
                _send(connection, refusal(), deadline_s)
            raise
        return acceptor.verify(_receive(connection, deadline_s))


@contextlib.contextmanager
def _as_untrusted(connection: socket.socket | TlsSocket) -> Iterator[None]:
    timeout_s = connection.gettimeout()
    try:
        yield
    except TimeoutError:
        raise NotRaypd("it did not prove itself in time") from None
    except OSError as error:
        raise HungUp(f"it closed the connection before it was authenticated: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            connection.settimeout(timeout_s)


def _send(connection: socket.socket | TlsSocket, message: bytes, deadline_s: float) -> None:
    connection.settimeout(_left_s(deadline_s))
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket | TlsSocket, deadline_s: float) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline_s))
    if size in _TLS_LENGTHS:
        raise NotRaypd("it speaks TLS here, where nothing is encrypted: internal_tls has to be the same at both ends")
    if size > MAX_MESSAGE_BYTES:
        raise NotRaypd("it does not speak raypd's handshake: it is an older raypd or another program")
    return _receive_exactly(connection, size, deadline_s)


def _receive_exactly(connection: socket.socket | TlsSocket, size: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(_left_s(deadline_s))
        if not (part := connection.recv(size - len(received))):
            raise HungUp("it closed the connection before it was authenticated")
        received += part
    return bytes(received)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
