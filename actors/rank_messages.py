"""What rank 0 of an engine and its further ranks say to each other, and the connection on which they say it.

Messages are pickled: both ends are one engine, of one version, and a connection counts only after both have proven that
they know the cluster's secret. Tensors never travel here; they go through the ranks' process group.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from actors.config import EngineConfig
from actors.core.outputs import SchedulerOutput
from actors.model.errors import RankLost
from kv_transfer.connector import KVConnectorOutput
from kv_transfer.errors import Untrusted
from kv_transfer.trust.byte_stream import accept_proof, dial_proof
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.membership import Member, TrustMaterial
from kv_transfer.trust.secret import Purpose

# A peer whose host is gone says nothing: keepalive finds out within about this long.
_KEEPALIVE_S: Final = 3
_NUM_KEEPALIVES: Final = 3


@dataclass(frozen=True, slots=True)
class RankTask:
    """Everything that a further rank needs to know to take part.

    hub, rendezvous: host and port, of rank 0's hub and of where the ranks' tensor-parallel group meets
    """

    config: EngineConfig
    engine_id: str
    incarnation: int
    tp_rank: int
    hub: tuple[str, int]
    rendezvous: tuple[str, int]
    trust: TrustMaterial

    @property
    def hub_party(self) -> Party:
        """The hub, as it proves itself."""
        return Party(self.engine_id, self.incarnation)

    @property
    def own_party(self) -> Party:
        """The rank, as it proves itself to the hub and to its peers on KV links."""
        return Party(f"{self.engine_id}/{self.tp_rank}", self.incarnation)


@dataclass(frozen=True, slots=True)
class RankReady:
    """A further rank is loaded and warm. control_address: of its end of KV transfers."""

    control_address: str


@dataclass(frozen=True, slots=True)
class RankWoke:
    """Something arrived or left at a further rank: a step is due."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """A further rank has computed a step. All as in ModelRunnerOutput; all ranks sample the same tokens."""

    token_ids: np.ndarray
    kv_connector_output: KVConnectorOutput | None
    adapter_loads: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A further rank cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankTrusts:
    """A further rank accepts the secrets of this generation, and no others."""

    generation: int


@dataclass(frozen=True, slots=True)
class RankStop:
    """Rank 0: the engine ends."""


RankMessage = RankReady | RankWoke | RankStep | RankTrusts | RankFailed
HubMessage = SchedulerOutput | TrustMaterial | RankStop


class RankConnection:
    """One end of the stream between rank 0 and a further rank. Sending is safe from any thread."""

    def __init__(self, peer: socket.socket, timeout_s: float) -> None:
        """timeout_s: how long a full stream may block a sender."""
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        self._connection = Connection(peer.detach())
        self._lock = threading.Lock()

    def introduce(self, own: Member, hub: Party, timeout_s: float) -> None:
        """Prove a rank to its hub, and have the hub prove itself. Raises RankLost."""
        try:
            dialer = Dialer(own.trust, Purpose.RANK, own.party, hub)
            with self._socket() as borrowed:
                dial_proof(borrowed, dialer, time.monotonic() + timeout_s)
        except Untrusted as error:
            raise RankLost(f"the hub did not prove itself: {error}") from error

    def identify(self, hub: Member, timeout_s: float) -> Party:
        """Let a caller prove itself, and prove the hub to it; nothing is unpickled before. Raises Untrusted."""
        acceptor = Acceptor(hub.trust, Purpose.RANK, hub.party)
        with self._socket() as borrowed:
            return accept_proof(borrowed, acceptor, time.monotonic() + timeout_s).dialer

    def send(self, message: RankMessage | HubMessage) -> None:
        """Send one message. Raises RankLost."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_pickled(self, message: bytes) -> None:
        """The same message to several ranks is pickled once. Raises RankLost."""
        with self._lock:
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                raise RankLost(f"nothing can be sent to a rank: {error!r}") from error

    def receive(self) -> object:
        """Wait for the next message, as long as the other end lives. Raises RankLost when it does not."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RankLost("its process is gone") from error

    def hang_up(self) -> None:
        """Wake whoever receives, at both ends; from any thread."""
        try:
            with self._socket() as borrowed:
                borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end was quicker.

    def close(self) -> None:
        """Release the socket; by whoever receives."""
        self._connection.close()

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        borrowed = socket.socket(fileno=self._connection.fileno())
        try:
            yield borrowed
        finally:
            borrowed.detach()


def _timeval(timeout_s: float) -> bytes:
    seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
    return struct.pack("ll", seconds, microseconds)
