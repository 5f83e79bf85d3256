"""TLS for the gRPC and HTTP servers, from certificate files that may be renewed at any time."""

from __future__ import annotations

import logging
import math
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography import x509
from pydantic import BaseModel, ConfigDict, Field

from cluster.errors import InvalidConfig
from kv_transfer.trust.watched_file import WatchedFiles

logger = logging.getLogger(__name__)


class TlsConfig(BaseModel):
    """Certificate files (PEM) for clients' connections. When files change, new connections use the new ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path = Field(description="The server's certificate, followed by intermediate certificates if any.")
    key: Path = Field(description="Private key of the certificate.")
    client_ca: Path | None = Field(
        None,
        description="Root certificates of clients, which then have to show a certificate (mutual TLS); default: "
        "clients need no certificate.",
    )


class ServerTls:
    """The TLS credentials of the gRPC and HTTP servers, which follow the files.

    New files that cannot be used, or do not fit together, are logged, and the previous certificates stay in use.
    """

    def __init__(self, config: TlsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files. Raises InvalidConfig if they cannot be used."""
        self._config = config
        paths = [config.certificate, config.key, *([config.client_ca] if config.client_ca is not None else [])]
        self._grpc_files, self._http_files = WatchedFiles(paths, clock), WatchedFiles(paths, clock)
        self._grpc_files.have_changed()
        self._http_files.have_changed()
        self._ends_at_s = math.inf
        self._newest = self._make_context()

    @property
    def ends_at_s(self) -> float:
        """The Unix time at which the first of the server's certificates in use expires."""
        return self._ends_at_s

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a gRPC server, which checks for new files at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._newer,  # type: ignore[arg-type]  # None is allowed, as grpc's documentation says
            require_client_authentication=self._config.client_ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for an HTTP server, which checks for a new certificate at each handshake.

        A new client_ca takes effect only at the next start.
        """
        context = self._newest = self._make_context()
        context.sni_callback = self._use_newest
        return context

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificates for gRPC, or None if the files have not changed; gRPC calls this on a thread."""
        if not self._grpc_files.have_changed():
            return None
        try:
            self._make_context()
            return self._read()
        except InvalidConfig as error:
            logger.error("cannot use the new certificates: the earlier ones stay in use", extra={"error": str(error)})
            return None

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Let a connection use the newest certificate; ssl calls this in each handshake, also without a host name."""
        del name
        if self._http_files.have_changed():
            try:
                self._newest = self._make_context()
            except InvalidConfig as error:
                logger.error(
                    "cannot use the new certificates: the earlier ones stay in use", extra={"error": str(error)}
                )
        if self._newest is not context:
            connection.context = self._newest

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        try:
            pair = config.key.read_bytes(), config.certificate.read_bytes()
            roots = None if config.client_ca is None else config.client_ca.read_bytes()
        except OSError as error:
            raise InvalidConfig("ingress.tls", [f"{error.filename} cannot be read: {error.strerror}"]) from error
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def _make_context(self) -> ssl.SSLContext:
        """Make a context from the files. Raises InvalidConfig if they cannot be used, or do not fit together."""
        config = self._config
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(config.certificate, config.key)
            certificates = x509.load_pem_x509_certificates(config.certificate.read_bytes())
            if config.client_ca is not None:
                context.load_verify_locations(config.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError, ValueError) as error:
            files = f"certificate {config.certificate}, key {config.key}, client_ca {config.client_ca}"
            raise InvalidConfig("ingress.tls", [f"cannot be used: {error} ({files})"]) from error
        self._ends_at_s = min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
        return context
