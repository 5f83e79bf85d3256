"""The transport between CPU engines: TCP across hosts, and copies straight out of the producer's pool on one host.

The producer listens on a TCP port and, if its pool is in a memory file, on an abstract Unix socket. The rendezvous lets
the consumer find both; it tries the Unix socket first. Such a socket exists within one network namespace. So between
hosts, or containers with networks of their own, connecting fails at once, and the consumer takes TCP, with TLS if the
cluster has it (internal_tls). Nothing has to be configured, and nothing that is missing on the way (no common /dev/shm,
no descriptor passing) fails the link.

Every process of the host can find these sockets: it can list the names of abstract ones. So both ends first prove the
key of the control stream that the link belongs to, together with a token of this one link, and neither of these travels
on the connection. Over the Unix socket the other end must also run as the producer's user. Then the producer passes the
pool's descriptor, through which the pool cannot be written; a consumer that has mapped the pool confirms it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import Tensor

from kv_transfer.errors import HungUp, KVTransferError, LinkLost, OtherUser, Untrusted
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.byte_stream import ByteStream
from kv_transfer.transports.link_opening import Opening
from kv_transfer.transports.shared_memory import SharedMemoryLink
from kv_transfer.transports.shared_pool import map_pool, open_pool, pool_bytes
from kv_transfer.transports.tcp_link import TcpLink
from kv_transfer.trust.callers import BACKLOG, PROOF_TIMEOUT_S, Caller, Callers, Prove, wait_welcome
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import KeySource, Purpose, SessionKey
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof
from kv_transfer.trust.tls import InternalTls, shake_hands
from kv_transfer.trust.tls_socket import TlsSocket

logger = logging.getLogger(__name__)

_MAPPED: Final = b"m"
_CREDENTIALS: Final = struct.Struct("3i")
"""The id of the process, of its user and of its group (struct ucred)."""
_PRODUCER: Final = Party("producer", 1)
_CONSUMER: Final = Party("consumer", 1)
"""The names of a link's two ends in the handshake. The control stream's key binds the engines' own names."""
_TOKEN_SIZE_BYTES: Final = 16
_NUM_PROBES: Final = 4
"""How many keepalive probes fit into the time after which a silent connection is given up."""
_GREETING_TIMEOUT_S: Final = 2.0
"""How long the consumer tries the Unix socket before it tries TCP, and how long it calls again after it was cut off."""
_INTERVAL_S: Final = 0.05
"""The pause before a consumer that was cut off, because too many others called the producer, calls again."""


class _PendingTcpLink:
    """A PendingLink, with its listening sockets. rendezvous: IP address, TCP port and the link's token"""

    def __init__(
        self,
        host: str,
        kv_cache: Tensor,
        silence_timeout_s: float,
        tls: InternalTls | None,
        key: KeySource | None,
        refusals: Refusals,
    ) -> None:
        self._kv_cache = kv_cache
        self._tls = tls
        self._silence_timeout_s = silence_timeout_s
        self._token = secrets.token_bytes(_TOKEN_SIZE_BYTES)
        self._key = key or SessionKey(self._token)
        self._refusals = refusals
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._pool_fd = open_pool(kv_cache)
        self._local_listener = None if self._pool_fd is None else _listen_locally(self._token)
        self.rendezvous = "|".join((*map(str, self._listener.getsockname()[:2]), self._token.hex()))

    def accept(self, timeout_s: float, opening: Opening | None = None) -> DataLink:
        opening, deadline_s = opening or Opening(), time.monotonic() + timeout_s
        proofs: dict[socket.socket, Prove[bool]] = {self._listener: self._prove}
        if self._local_listener is not None:
            proofs[self._local_listener] = self._prove_locally
        with self._closing(), contextlib.ExitStack() as waiting:
            for listener in proofs:
                waiting.enter_context(opening.waking(listener))
            callers = waiting.enter_context(Callers(proofs))
            try:
                caller = callers.take(deadline_s)
            except TimeoutError:
                raise LinkLost(f"the peer did not join the link within {timeout_s:g} s") from None
            if caller is None:
                opening.check()
                raise LinkLost("no connection can be accepted: the listening socket was shut down")
            return self._link(caller)

    def _link(self, caller: Caller[bool]) -> DataLink:
        """Make the link with the consumer. caller.who: whether the consumer has mapped the pool"""
        if caller.who:
            assert isinstance(caller.stream, socket.socket), "there is no TLS within a host"
            return _announced(SharedMemoryLink(ByteStream(caller.stream), pool_bytes(self._kv_cache)))
        return _tcp_link(caller.stream, self._silence_timeout_s)

    def _prove(self, connection: socket.socket, address: str) -> Caller[bool] | None:
        """Let a caller prove itself over TCP; return None, with the connection closed, if it does not."""
        stream = connection if self._tls is None else self._tls.accepting(connection)
        if self._is_proven(stream, Purpose.DATA_LINK, time.monotonic() + PROOF_TIMEOUT_S, address):
            return Caller(stream, False)
        stream.close()
        return None

    def _prove_locally(self, connection: socket.socket, address: str) -> Caller[bool] | None:
        """Let a caller prove itself over the Unix socket, and pass the pool's descriptor to it.

        Returns None, with the connection closed, if it does not prove itself, or cannot map the pool and will use TCP.
        """
        assert self._pool_fd is not None, "the Unix socket exists only for a pool in a file"
        user, deadline_s = _user_of(connection), time.monotonic() + PROOF_TIMEOUT_S
        if user != os.geteuid():
            self._refusals.add(Purpose.SHARED_MEMORY, f"user {user}", OtherUser(f"it runs as user {user}"))
        elif self._is_proven(connection, Purpose.SHARED_MEMORY, deadline_s, address):
            with contextlib.suppress(OSError, KVTransferError):
                socket.send_fds(connection, [_MAPPED], [self._pool_fd])
                mapped = bytearray(len(_MAPPED))
                ByteStream(connection).receive([memoryview(mapped)], deadline_s)
                if mapped == _MAPPED:
                    connection.setblocking(True)
                    return Caller(connection, True)
        connection.close()
        return None

    def _is_proven(
        self, connection: socket.socket | TlsSocket, purpose: Purpose, deadline_s: float, address: str
    ) -> bool:
        """Return whether the link's consumer has connected. A stranger is counted; the consumer may still come."""
        acceptor = Acceptor(self._key, purpose, _PRODUCER, bound=self._token)
        try:
            if isinstance(connection, TlsSocket):
                shake_hands(connection, deadline_s)
            accept_proof(connection, acceptor, deadline_s)
        except Untrusted as error:
            self._refusals.add(purpose, address, error)
            return False
        except OSError as error:
            self._refusals.add(
                purpose, address, HungUp(f"it closed the connection before it was authenticated: {error}")
            )
            return False
        return True

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._listener.close()
            if self._local_listener is not None:
                self._local_listener.close()
            if self._pool_fd is not None:
                os.close(self._pool_fd)


class TcpTransport:
    """A Transport of CPU memory, by TCP or by shared memory."""

    name = "tcp"

    def __init__(
        self,
        host: str,
        kv_cache: Tensor,
        silence_timeout_s: float,
        tls: InternalTls | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """host: this end's own address, at which its peers reach it

        silence_timeout_s: how long a connection may be without a sign of the peer's host, whether bytes move or not
        tls:               encrypts TCP connections; None: they are not encrypted
        refusals:          counts connections whose other end does not prove that it is the link's consumer
        """
        self._host = host
        self._refusals = refusals or Refusals()
        self._tls = tls
        self._kv_cache = kv_cache
        self._silence_timeout_s = silence_timeout_s

    def listen(self, key: KeySource | None = None) -> _PendingTcpLink:
        """Open the listening sockets; see Transport."""
        try:
            return _PendingTcpLink(self._host, self._kv_cache, self._silence_timeout_s, self._tls, key, self._refusals)
        except OSError as error:
            raise LinkLost(f"cannot open a rendezvous at {self._host}: {error}") from error

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> DataLink:
        """Map the producer's pool if it is on this host, otherwise connect by TCP; see Transport."""
        opening, deadline_s = opening or Opening(), time.monotonic() + timeout_s
        address, token = _read_rendezvous(rendezvous)
        proof = _Proof(key or SessionKey(token), token)
        local = _connect_locally(proof, deadline_s, opening)
        if local is not None:
            return local
        return _tcp_link(_connect(address, proof, deadline_s, opening, self._tls), self._silence_timeout_s)


@dataclass(frozen=True, slots=True)
class _Proof:
    """The means of a consumer's proof: the key of the control stream, and the link's token."""

    key: KeySource
    token: bytes

    def dial(self, connection: socket.socket | TlsSocket, purpose: Purpose, deadline_s: float) -> None:
        """Prove this end on a connection, and check the other end's proof. Raises Untrusted."""
        dial_proof(connection, Dialer(self.key, purpose, _CONSUMER, _PRODUCER, bound=self.token), deadline_s)


def _read_rendezvous(rendezvous: str) -> tuple[tuple[str, int], bytes]:
    """Return the address and the token. Raises LinkLost if the text, which comes from the peer, is no rendezvous."""
    try:
        host, port_text, token_hex = rendezvous.split("|")
        port, token = int(port_text), bytes.fromhex(token_hex)
    except ValueError as error:
        raise LinkLost(f"the peer's rendezvous cannot be read: {error}") from error
    if not 0 < port < 2**16 or len(token) != _TOKEN_SIZE_BYTES:
        raise LinkLost(f"the peer's rendezvous has port {port} and a token of {len(token)} bytes")
    return (host, port), token


def _tcp_link(connection: socket.socket | TlsSocket, silence_timeout_s: float) -> TcpLink:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _watch_for_silence(connection, silence_timeout_s)
    return _announced(TcpLink(ByteStream(connection), "tcp" if isinstance(connection, socket.socket) else "tcp, TLS"))


def _watch_for_silence(connection: socket.socket | TlsSocket, timeout_s: float) -> None:
    """Let the kernel end the connection if the peer's host acknowledges neither data nor probes for timeout_s."""
    probe_s = max(1, round(timeout_s / _NUM_PROBES))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    # TCP_USER_TIMEOUT bounds unanswered probes as well, so the number of probes (TCP_KEEPCNT) has no effect.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


_Link = TypeVar("_Link", TcpLink, SharedMemoryLink)


def _announced(link: _Link) -> _Link:
    logger.info("a KV link is up", extra={"path": link.path})
    return link


def _local_name(token: bytes) -> str:
    # An abstract name (it begins with a zero byte) is no file, so nothing has to be removed. Every user of the host can
    # list it, so it must not tell the token.
    return f"\0raypd-kv-{hashlib.sha256(b'name of ' + token).hexdigest()[:32]}"


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as it was when it connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def _listen_locally(token: bytes) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_local_name(token))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _connect(
    address: tuple[str, int], proof: _Proof, deadline_s: float, opening: Opening, tls: InternalTls | None
) -> socket.socket | TlsSocket:
    """Connect by TCP, again for a while if the producer hangs up because it has too many callers. Raises LinkLost."""
    host, port = address
    give_up_s = min(deadline_s, time.monotonic() + _GREETING_TIMEOUT_S)
    while True:
        try:
            return _connect_once(address, proof, deadline_s, opening, tls)
        except (OSError, LinkLost, Untrusted) as error:
            opening.check()
            if not isinstance(error, HungUp) or time.monotonic() + _INTERVAL_S > give_up_s:
                raise LinkLost(f"cannot join the rendezvous at {host}:{port}: {error}") from error
            time.sleep(_INTERVAL_S)


def _connect_once(
    address: tuple[str, int], proof: _Proof, deadline_s: float, opening: Opening, tls: InternalTls | None
) -> socket.socket | TlsSocket:
    """Connect by TCP, prove this end and wait for the welcome. Raises OSError, LinkLost or Untrusted."""
    connection: socket.socket | TlsSocket
    connection = plain = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        with opening.waking(plain):
            plain.settimeout(max(0.001, deadline_s - time.monotonic()))
            plain.connect(address)
            # A socket that give_up() shuts down just before connect() reports that it is connected, but never sends:
            # check again.
            opening.check()
        if tls is not None:
            connection = tls.dialling(plain)
        with opening.waking(connection):
            if isinstance(connection, TlsSocket):
                shake_hands(connection, deadline_s)
            proof.dial(connection, Purpose.DATA_LINK, deadline_s)
            wait_welcome(connection, deadline_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_locally(proof: _Proof, deadline_s: float, opening: Opening) -> SharedMemoryLink | None:
    """Return a link over the producer's pool; None if it is on another host or in no file, or cannot be mapped."""
    deadline_s = min(deadline_s, time.monotonic() + _GREETING_TIMEOUT_S)
    while True:
        try:
            return _announced(_connect_locally_once(proof, deadline_s, opening))
        except (OSError, IndexError, ValueError, LinkLost, Untrusted) as error:
            if not isinstance(error, HungUp) or time.monotonic() + _INTERVAL_S > deadline_s:
                return None
            time.sleep(_INTERVAL_S)


def _connect_locally_once(proof: _Proof, deadline_s: float, opening: Opening) -> SharedMemoryLink:
    """Connect to the Unix socket, prove this end and map the pool.

    Raises OSError, IndexError, ValueError, LinkLost or Untrusted.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        with opening.waking(connection):
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(_local_name(proof.token))
            proof.dial(connection, Purpose.SHARED_MEMORY, deadline_s)
            _, fds, _, _ = socket.recv_fds(connection, len(_MAPPED), 1)
            memory = map_pool(fds[0])
            connection.sendall(_MAPPED)
            wait_welcome(connection, deadline_s)
    except BaseException:
        connection.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return SharedMemoryLink(ByteStream(connection), memory)
