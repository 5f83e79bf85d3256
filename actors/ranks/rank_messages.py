"""The messages between rank 0 of an engine and its further ranks, and the connection that carries them.

Both ends belong to one engine and run the same version. A connection is used only after both ends have proven that they
know the cluster's secret; it is inside TLS if the cluster uses TLS. Messages are encoded with msgspec, and each field
has a range (rank_codec.py). Tensors are not sent here: the ranks exchange them through their process group.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Annotated, Final, get_args

import numpy as np
from msgspec import Meta

from actors.config import EngineConfig
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.errors import RankLost
from actors.ranks.rank_codec import RankCodec
from actors.ranks.rank_stream import RankStream
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.errors import Untrusted
from kv_transfer.message_ranges import MALFORMED, MAX_KINDS, Address, LongText, Sentence, ShortBytes, Total, WireName
from kv_transfer.trust.callers import wait_welcome
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.membership import Member, TrustMaterial
from kv_transfer.trust.secret import MAX_ACCEPTED, Purpose
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof
from kv_transfer.trust.tls import TlsFiles, TlsMaterial
from kv_transfer.trust.tls_socket import TlsSocket


@dataclass(frozen=True, slots=True)
class RankTask:
    """The settings, names, addresses and secrets with which a further rank starts.

    hub, rendezvous: host and port of rank 0's hub, and of the rendezvous of the tensor-parallel group
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
        """The party as which the hub proves itself."""
        return Party(self.engine_id, self.incarnation)

    @property
    def own_party(self) -> Party:
        """The party as which the rank proves itself to the hub and to its peers on KV links."""
        return Party(f"{self.engine_id}/{self.tp_rank}", self.incarnation)


@dataclass(frozen=True, slots=True)
class RankReady:
    """A further rank is loaded and warmed up. control_address: host:port of its control streams for KV transfers."""

    control_address: Address


@dataclass(frozen=True, slots=True)
class RankWoke:
    """Something arrived or left at a further rank: a step is due."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """A further rank has computed a step. Fields are as in ModelRunnerOutput; all ranks sample the same tokens."""

    token_ids: np.ndarray
    kv_connector_output: KVConnectorOutput | None
    adapter_loads: Annotated[dict[WireName, LongText | None], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A further rank has failed and ends. reason: the error."""

    reason: LongText


@dataclass(frozen=True, slots=True)
class RankTrusts:
    """A further rank accepts the secrets of this generation, and no others."""

    generation: Total


@dataclass(frozen=True, slots=True)
class RankRefusals:
    """How many connections a further rank has refused since its start, as their callers did not prove themselves."""

    total: Total


@dataclass(frozen=True, slots=True)
class RankStop:
    """The engine ends, so the further ranks have to end."""


@dataclass(frozen=True, slots=True)
class RankSecrets:
    """The cluster's new secrets: a TrustMaterial, with one field for each type that its `tls` may have."""

    generation: Total
    secrets: Annotated[tuple[ShortBytes, ...], Meta(max_length=MAX_ACCEPTED)] = field(repr=False)
    secret_file: Sentence
    block_hash_key: ShortBytes = field(repr=False)
    block_hash_key_file: Sentence
    tls_material: TlsMaterial | None = None
    tls_files: TlsFiles | None = None

    @classmethod
    def of(cls, material: TrustMaterial) -> RankSecrets:
        """Return the message that carries this material."""
        tls = material.tls
        return cls(
            material.generation,
            material.secrets,
            material.secret_file,
            material.block_hash_key,
            material.block_hash_key_file,
            tls if isinstance(tls, TlsMaterial) else None,
            tls if isinstance(tls, TlsFiles) else None,
        )

    @property
    def material(self) -> TrustMaterial:
        """The secrets and certificates that the message carries."""
        return TrustMaterial(
            self.generation,
            self.secrets,
            self.secret_file,
            self.block_hash_key,
            self.block_hash_key_file,
            self.tls_material or self.tls_files,
        )


RankMessage = RankReady | RankWoke | RankStep | RankTrusts | RankRefusals | RankFailed
HubMessage = SchedulerOutput | RankSecrets | RankStop
CODEC: Final = RankCodec((*get_args(RankMessage), *get_args(HubMessage)))


class RankConnection:
    """One end of the stream between rank 0 and a further rank. Sending is safe from any thread."""

    def __init__(self, peer: socket.socket, timeout_s: float) -> None:
        """timeout_s: how long a full stream may block a sender."""
        self._stream = RankStream(peer, timeout_s)

    def introduce(self, own: Member, hub: Party, timeout_s: float) -> None:
        """Let this rank and the hub prove to each other who they are. Raises RankLost."""
        deadline_s = time.monotonic() + timeout_s
        try:
            stream = self._stream.encrypt(own.trust.tls, is_dialler=True, deadline_s=deadline_s)
            dial_proof(stream, Dialer(own.trust, Purpose.RANK, own.party, hub), deadline_s)
            wait_welcome(stream, deadline_s)
        except Untrusted as error:
            self._stream.close()
            raise RankLost(f"the hub did not prove itself: {error}") from error

    def identify(self, hub: Member, timeout_s: float) -> tuple[socket.socket | TlsSocket, Party]:
        """Let a caller and the hub prove to each other who they are, before anything else is read.

        Returns the socket on which to answer the caller, and the party that the caller proved to be. Raises Untrusted.
        """
        deadline_s = time.monotonic() + timeout_s
        stream = self._stream.encrypt(hub.trust.tls, is_dialler=False, deadline_s=deadline_s)
        return stream, accept_proof(stream, Acceptor(hub.trust, Purpose.RANK, hub.party), deadline_s).dialer

    def send(self, message: RankMessage | HubMessage) -> None:
        """Send one message. Raises RankLost."""
        self.send_encoded(CODEC.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send an encoded message, which may go to several ranks. Raises RankLost."""
        try:
            self._stream.send(message)
        except OSError as error:
            raise RankLost(f"sending to the rank failed: {error!r}") from error

    def receive(self) -> object:
        """Wait for the next message, without a timeout. Raises RankLost when the other end is gone."""
        try:
            frame = self._stream.receive()
        except (OSError, EOFError) as error:
            raise RankLost("its process has ended or closed the connection") from error
        try:
            return CODEC.decode(frame)
        except MALFORMED as error:
            raise RankLost(f"it sent a malformed message: {error}") from error

    def hang_up(self) -> None:
        """Shut the connection down, which wakes the threads that receive at both ends. Safe from any thread."""
        with contextlib.suppress(OSError):  # The other end has already closed the connection.
            self._stream.hang_up()

    def close(self) -> None:
        """Release the socket. Only the thread that receives may call this."""
        self._stream.close()
