"""How the ranks of an engine on CPUs call each other: TLS if the cluster has it, then a proof of its secret.

Callers are heard on threads of their own, each for a few seconds, and so many at a time. A stranger who says nothing
holds up nobody; a rank that finds no thread free, or a stranger in its peer's place, calls again until its deadline.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kv_transfer.errors import OtherParty, Untrusted
from kv_transfer.refused_messages import RefusedMessages
from kv_transfer.trust.byte_stream import accept_proof, dial_proof
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.secret import KeySource, Purpose
from kv_transfer.trust.tls import InternalTls, shake_hands
from kv_transfer.trust.tls_socket import TlsSocket

_HEARING_TIMEOUT_S: Final = 5.0
_MAX_CALLERS: Final = 64
_INTERVAL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankTrust:
    """What an engine's ranks prove themselves to each other with, and encrypt with unless tls is None."""

    keys: KeySource
    engine: Party
    tls: InternalTls | None = None

    def party(self, rank: int) -> Party:
        """Return a rank's name in proofs."""
        return Party(f"{self.engine.name}/{rank}", self.engine.incarnation)


def call_rank(
    connection: socket.socket, own: int, peer: int, trust: RankTrust, deadline_s: float
) -> socket.socket | TlsSocket:
    """Prove this rank to the one at the other end, and have that one prove itself; returns what to talk over.

    The connection is closed if this fails. Raises Untrusted or OSError.
    """
    dialer = Dialer(trust.keys, Purpose.TENSOR_PARALLEL, trust.party(own), trust.party(peer))
    deadline_s = min(deadline_s, time.monotonic() + _HEARING_TIMEOUT_S)
    stream: socket.socket | TlsSocket = connection
    try:
        if trust.tls is not None:
            stream = trust.tls.dialling(connection)
            shake_hands(stream, deadline_s)
        dial_proof(stream, dialer, deadline_s)
    except BaseException:
        stream.close()
        raise
    return stream


class RankCallers:
    """The calls that come to one rank. A context manager: while inside, callers are heard."""

    def __init__(self, server: socket.socket, own: int, trust: RankTrust) -> None:
        self._server = server
        self._own = own
        self._trust = trust
        self._refused = RefusedMessages()
        self._proven: queue.SimpleQueue[tuple[int, socket.socket | TlsSocket]] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(_MAX_CALLERS)
        self._is_over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="rank-listener", daemon=True)

    def __enter__(self) -> RankCallers:
        self._server.settimeout(_INTERVAL_S)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._listener.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._proven.get_nowait()[1].close()

    def take(self, ranks: set[int], deadline_s: float) -> Iterator[tuple[int, socket.socket | TlsSocket]]:
        """Hand out the connection of each of these ranks, as they call. Raises TimeoutError."""
        missing = set(ranks)
        while missing:
            try:
                rank, peer = self._proven.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"ranks {sorted(missing)} did not call in time") from None
            if rank in missing:
                missing.remove(rank)
                yield rank, peer
            else:
                peer.close()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                peer, address = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._slots.acquire(blocking=False):
                arguments = (peer, str(address[0]))
                threading.Thread(target=self._hear, args=arguments, name="rank-caller", daemon=True).start()
            else:
                peer.close()

    def _hear(self, peer: socket.socket, host: str) -> None:
        stream: socket.socket | TlsSocket = peer
        try:
            if self._trust.tls is not None:
                stream = self._trust.tls.accepting(peer)
            rank = self._prove(stream)
            if self._is_over.is_set():
                stream.close()
            else:
                self._proven.put((rank, stream))
        except (OSError, Untrusted, ValueError) as error:
            self._refused.add(Purpose.TENSOR_PARALLEL, host, str(error))
            stream.close()
        finally:
            self._slots.release()

    def _prove(self, stream: socket.socket | TlsSocket) -> int:
        """Which rank this is. Raises Untrusted, OSError or ValueError."""
        acceptor = Acceptor(self._trust.keys, Purpose.TENSOR_PARALLEL, self._trust.party(self._own))
        deadline_s = time.monotonic() + _HEARING_TIMEOUT_S
        if isinstance(stream, TlsSocket):
            shake_hands(stream, deadline_s)
        caller = accept_proof(stream, acceptor, deadline_s).dialer
        name, _, rank = caller.name.rpartition("/")
        if (name, caller.incarnation) != (self._trust.engine.name, self._trust.engine.incarnation):
            raise OtherParty(f"{caller} is no rank of {self._trust.engine}")
        return int(rank)


def wait_to_call_again(deadline_s: float) -> bool:
    """Wait a moment; returns False if the deadline comes first."""
    left_s = deadline_s - time.monotonic()
    if left_s <= _INTERVAL_S:
        return False
    time.sleep(_INTERVAL_S)
    return True
