"""The messages between rank 0 of an engine and its further ranks, and the connection that carries them.

Both ends are one engine, of one version, and a connection counts only after both have proven that they know the
cluster's secret, inside TLS if the cluster has it. Messages are msgspec's, and each field has a range (rank_codec.py).
Tensors never travel here; they go through the ranks' process group.
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
    """A further rank cannot go on."""

    reason: LongText


@dataclass(frozen=True, slots=True)
class RankTrusts:
    """A further rank accepts the secrets of this generation, and no others."""

    generation: Total


@dataclass(frozen=True, slots=True)
class RankRefusals:
    """A further rank has refused `total` connections since its start, whose callers did not prove themselves."""

    total: Total


@dataclass(frozen=True, slots=True)
class RankStop:
    """Rank 0: the engine ends."""


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
        """Prove a rank to its hub, and have the hub prove itself. Raises RankLost."""
        deadline_s = time.monotonic() + timeout_s
        try:
            stream = self._stream.encrypt(own.trust.tls, is_dialler=True, deadline_s=deadline_s)
            dial_proof(stream, Dialer(own.trust, Purpose.RANK, own.party, hub), deadline_s)
            wait_welcome(stream, deadline_s)
        except Untrusted as error:
            self._stream.close()
            raise RankLost(f"the hub did not prove itself: {error}") from error

    def identify(self, hub: Member, timeout_s: float) -> tuple[socket.socket | TlsSocket, Party]:
        """Let a caller prove itself, and prove the hub to it, before anything else is read.

        Returns the socket on which to welcome the caller, and the caller's party. Raises Untrusted.
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
            raise RankLost(f"nothing can be sent to a rank: {error!r}") from error

    def receive(self) -> object:
        """Wait for the next message, for as long as the other end lives. Raises RankLost when it ends."""
        try:
            frame = self._stream.receive()
        except (OSError, EOFError) as error:
            raise RankLost("its process is gone") from error
        try:
            return CODEC.decode(frame)
        except MALFORMED as error:
            raise RankLost(f"what it said is no message: {error}") from error

    def hang_up(self) -> None:
        """Wake the threads that receive, at both ends; from any thread."""
        with contextlib.suppress(OSError):  # The other end was quicker.
            self._stream.hang_up()

    def close(self) -> None:
        """Release the socket; only from the thread that receives."""
        self._stream.close()
