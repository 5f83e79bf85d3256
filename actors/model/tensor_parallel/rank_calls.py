"""How the ranks of an engine on CPUs connect to each other: TLS if the cluster has it, then a proof of its secret.

A stranger that connects and sends nothing delays no rank (kv_transfer/trust/callers.py). A rank whose connection is
closed, or is answered by a stranger, connects again until its deadline.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from kv_transfer.errors import HungUp, OtherParty, Untrusted
from kv_transfer.trust.callers import PROOF_TIMEOUT_S, Caller, Callers, wait_welcome
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import KeySource, Purpose
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof
from kv_transfer.trust.tls import InternalTls, shake_hands
from kv_transfer.trust.tls_socket import TlsSocket

_MAX_RANK_DIGITS: Final = 4
_INTERVAL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankTrust:
    """The secret, and the certificates if tls is given, by which an engine's ranks authenticate each other.

    refusals: counts the callers that do not prove the secret
    """

    keys: KeySource
    engine: Party
    tls: InternalTls | None = None
    refusals: Refusals = field(default_factory=Refusals)

    def party(self, rank: int) -> Party:
        """Return a rank's name in proofs."""
        return Party(f"{self.engine.name}/{rank}", self.engine.incarnation)


def call_rank(
    connection: socket.socket, own: int, peer: int, trust: RankTrust, deadline_s: float
) -> socket.socket | TlsSocket:
    """Authenticate this rank and its peer to each other; return the connection, with TLS if the cluster has it.

    The connection is closed if this fails. Raises Untrusted or OSError.
    """
    dialer = Dialer(trust.keys, Purpose.TENSOR_PARALLEL, trust.party(own), trust.party(peer))
    deadline_s = min(deadline_s, time.monotonic() + PROOF_TIMEOUT_S)
    stream: socket.socket | TlsSocket = connection
    try:
        if trust.tls is not None:
            stream = trust.tls.dialling(connection)
            shake_hands(stream, deadline_s)
        dial_proof(stream, dialer, deadline_s)
        wait_welcome(stream, deadline_s)
    except BaseException:
        stream.close()
        raise
    return stream


class RankCallers:
    """The connections to one rank. A context manager: they are accepted and authenticated while it is open."""

    def __init__(self, server: socket.socket, own: int, trust: RankTrust) -> None:
        self._own = own
        self._trust = trust
        self._callers = Callers[int]({server: self._hear})

    def __enter__(self) -> RankCallers:
        self._callers.__enter__()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._callers.__exit__(error_type, error, trace)

    def take(self, ranks: set[int], deadline_s: float) -> Iterator[tuple[int, socket.socket | TlsSocket]]:
        """Yield each of these ranks with its connection, in the order in which they connect.

        Raises TimeoutError or OSError.
        """
        missing = set(ranks)
        while missing:
            try:
                caller = self._callers.take(deadline_s)
            except TimeoutError:
                raise TimeoutError(f"ranks {sorted(missing)} did not connect in time") from None
            if caller is None:
                raise ConnectionAbortedError("the socket that ranks connect to was shut down")
            if caller.who in missing:
                missing.remove(caller.who)
                yield caller.who, caller.stream
            else:
                caller.stream.close()

    def _hear(self, peer: socket.socket, address: str) -> Caller[int] | None:
        stream: socket.socket | TlsSocket = peer
        try:
            if self._trust.tls is not None:
                stream = self._trust.tls.accepting(peer)
            return Caller(stream, self._prove(stream))
        except Untrusted as error:
            self._trust.refusals.add(Purpose.TENSOR_PARALLEL, address, error)
        except OSError as error:
            reason = HungUp(f"it closed the connection before it was authenticated: {error}")
            self._trust.refusals.add(Purpose.TENSOR_PARALLEL, address, reason)
        stream.close()
        return None

    def _prove(self, stream: socket.socket | TlsSocket) -> int:
        """Let the caller prove the cluster's secret, and return its rank. Raises Untrusted or OSError."""
        acceptor = Acceptor(self._trust.keys, Purpose.TENSOR_PARALLEL, self._trust.party(self._own))
        deadline_s = time.monotonic() + PROOF_TIMEOUT_S
        if isinstance(stream, TlsSocket):
            shake_hands(stream, deadline_s)
        caller = accept_proof(stream, acceptor, deadline_s).dialer
        name, _, rank = caller.name.rpartition("/")
        is_rank = rank.isascii() and rank.isdecimal() and len(rank) <= _MAX_RANK_DIGITS
        if not is_rank or (name, caller.incarnation) != (self._trust.engine.name, self._trust.engine.incarnation):
            raise OtherParty(f"{caller} is no rank of {self._trust.engine}")
        return int(rank)


def wait_to_call_again(deadline_s: float) -> bool:
    """Wait a moment; returns False if the deadline comes first."""
    left_s = deadline_s - time.monotonic()
    if left_s <= _INTERVAL_S:
        return False
    time.sleep(_INTERVAL_S)
    return True
