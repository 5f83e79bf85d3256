"""TLS between the processes of a cluster: both ends show a certificate of the cluster's authority, for one name.

The handshake under the cluster's secret (kv_transfer.trust.handshake) follows inside the TLS connection. TLS hides the
bytes from everybody on the way, and a process without a certificate does not get as far as that handshake. TLS 1.3 (RFC
8446) is the only version that is accepted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import grpc
import grpc.aio
from msgspec import Meta

from kv_transfer.errors import NotRaypd, SecretUnusable, TlsUnusable
from kv_transfer.trust.secret_file import refuse_open_mode
from kv_transfer.trust.tls_socket import TlsSocket
from kv_transfer.trust.watched_file import WatchedFiles

logger = logging.getLogger(__name__)

CLUSTER_NAME: Final = "raypd.internal"
"""The DNS name in every process's certificate. It is never looked up."""

_MAX_PEM_BYTES: Final = 60 * 1024
"""The most bytes of a certificate or a key: a pipe holds at least so many without a reader."""
_Pem: TypeAlias = Annotated[bytes, Meta(max_length=2**20)]
_Path: TypeAlias = Annotated[str, Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The certificate that a process shows, with its key, and the authority that the process trusts; all in PEM.

    authority:   certificate of the authority whose certificates are accepted
    certificate: for CLUSTER_NAME, signed by that authority, for servers and for clients
    key:         the certificate's private key
    """

    authority: _Pem
    certificate: _Pem
    key: _Pem = field(repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a TlsMaterial's files on every node. A file that changes is used from the next connection on."""

    authority: _Path
    certificate: _Path
    key: _Path

    def read(self) -> TlsMaterial:
        """Read the three files. Raises TlsUnusable, also if other users can read the private key."""
        try:
            authority, certificate = (Path(path).read_bytes() for path in (self.authority, self.certificate))
            with Path(self.key).open("rb") as file:
                refuse_open_mode(self.key, file)
                return TlsMaterial(authority, certificate, file.read())
        except SecretUnusable as error:
            raise TlsUnusable(f"internal_tls: {error}") from error
        except OSError as error:
            raise TlsUnusable(f"internal_tls: {error.filename} cannot be read: {error.strerror}") from error


class InternalTls:
    """This process's side of every TLS connection within the cluster. Any thread may call the methods.

    If files become unusable, the certificates that were read before stay in use, and the log has the reason.
    """

    def __init__(self, source: TlsMaterial | TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the certificates and try them. Raises TlsUnusable."""
        self._source = source
        self._lock = threading.Lock()
        paths = (source.authority, source.certificate, source.key) if isinstance(source, TlsFiles) else ()
        self._files = WatchedFiles([Path(path) for path in paths], clock)
        self._files.have_changed()
        self._current = _Contexts(source.read() if isinstance(source, TlsFiles) else source)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server; each of its handshakes uses the newest certificate."""
        used = [self._newest()]

        def newer() -> grpc.ServerCertificateConfiguration | None:
            newest = self._newest()
            if newest is used[0]:
                return None
            used[0] = newest
            return newest.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            used[0].server_configuration(),
            newer,  # type: ignore[arg-type]  # None is allowed, as grpc's documentation says
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel, with the newest certificate."""
        material = self._newest().material
        return grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)

    def accepting(self, connection: socket.socket) -> TlsSocket:
        """Take over a connection that was accepted; the caller then calls TlsSocket.handshake()."""
        return TlsSocket(connection, self._newest().server, server_hostname=None)

    def dialling(self, connection: socket.socket) -> TlsSocket:
        """Take over a connection that was dialled; the caller then calls TlsSocket.handshake()."""
        return TlsSocket(connection, self._newest().client, server_hostname=CLUSTER_NAME)

    def _newest(self) -> _Contexts:
        if isinstance(self._source, TlsMaterial):
            return self._current
        with self._lock:
            if self._files.have_changed():
                try:
                    self._current = _Contexts(self._source.read())
                except TlsUnusable as error:
                    logger.error(
                        "cannot use the cluster's new certificates: the earlier ones stay in use",
                        extra={"error": str(error)},
                    )
            return self._current


def open_channel(address: str, options: Sequence[tuple[str, str | int]], tls: InternalTls | None) -> grpc.aio.Channel:
    """Open a gRPC channel to another process of the cluster, with TLS if the cluster has it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, ("grpc.ssl_target_name_override", CLUSTER_NAME)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=named)


def listen(server: grpc.aio.Server, address: str, tls: InternalTls | None) -> int:
    """Let a gRPC server listen, with TLS if the cluster has it; return the port."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def tls_advice(tls: InternalTls | None) -> str:
    """Return a hint to add to the reason why a gRPC connection failed: TLS settings may differ. Empty without TLS."""
    return "" if tls is None else " (internal_tls is on here: it has to be on there too, under the same authority)"


def shake_hands(connection: TlsSocket, deadline_s: float) -> None:
    """Complete TLS's handshake before the deadline. Raises NotRaypd, with the setting to check, or OSError."""
    try:
        connection.handshake(deadline_s)
    except ssl.SSLCertVerificationError as error:
        raise NotRaypd(f"its certificate is not of this cluster's authority: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise NotRaypd(
            f"no TLS connection came about ({_reason(error)}): internal_tls has to be the same at both ends"
        ) from error


class _Contexts:
    """The ssl contexts of one set of certificates, for both ends of connections."""

    def __init__(self, material: TlsMaterial) -> None:
        self.material = material
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, material)
        # No session is resumed: each connection shows its certificates.
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, material)
        self._refuse_unusable()

    def _refuse_unusable(self) -> None:
        """Let two ends shake hands in memory, as two processes of the cluster will. Raises TlsUnusable.

        So a certificate that has expired, or is for another name, of another authority or for servers only, is found
        here, and not by every connection.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(to_client, to_server, server_hostname=CLUSTER_NAME)
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        try:
            for end in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise TlsUnusable(
                f"internal_tls: processes that show this certificate would refuse each other: {error.verify_message}; "
                f"it has to be of this authority, valid now, for the DNS name {CLUSTER_NAME}, for servers and clients"
            ) from error
        except ssl.SSLError as error:
            raise TlsUnusable(f"internal_tls: authority, certificate and key cannot be used: {error}") from error

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        material = self.material
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)


def _context(protocol: int, material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=material.authority.decode("ascii"))
        with _memory_file(material.certificate) as certificate, _memory_file(material.key) as key:
            context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise TlsUnusable(f"internal_tls: authority, certificate and key cannot be used: {error}") from error
    return context


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """Offer bytes as a file that is on no disk, a pipe: ssl reads certificates and keys from files only."""
    if len(content) > _MAX_PEM_BYTES:
        raise ValueError(f"a PEM file has {len(content)} bytes; at most {_MAX_PEM_BYTES} are allowed")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(writing, content)
        os.close(writing)
        yield f"/proc/self/fd/{reading}"
    finally:
        os.close(reading)


def _reason(error: ssl.SSLError) -> str:
    # Errors that Python itself raises, such as an unexpected end, have no reason.
    return (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
