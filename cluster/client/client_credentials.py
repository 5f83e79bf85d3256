"""The credentials of a client: its token, its own certificate, and the authorities that it trusts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.api.protos.loopback_addresses import is_loopback
from cluster.api.protos.shared_errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token and the TLS settings that a client connects with. All files are PEM.

    token:       the bearer token; "": none
    tls:         whether connections are encrypted; they also are if ca or certificate is given
    ca:          file of the certificate authorities that the client trusts; None: the system's
    certificate: file of the client's own certificate, for an ingress that asks for one (mutual TLS)
    key:         file of the private key of that certificate
    insecure:    whether the token may be sent in plain text to other hosts than this one
    """

    token: str = field(default="", repr=False)
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Credentials:
        """Read the credentials from environment variables.

        RAYPD_TOKEN is the token, RAYPD_TOKEN_FILE a file with the token; RAYPD_TLS and RAYPD_INSECURE are set unless
        they are empty or "0"; RAYPD_TLS_CA, RAYPD_TLS_CERT and RAYPD_TLS_KEY are files.
        Raises InvalidConfig if the token's file cannot be read.
        """
        ca, certificate, key, token_file = (
            Path(value) if (value := variables.get(f"RAYPD_{name}")) else None
            for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE")
        )
        token = variables.get("RAYPD_TOKEN", "") or (_read(token_file) or b"").decode(errors="replace")
        tls, insecure = (variables.get(f"RAYPD_{name}", "") not in ("", "0") for name in ("TLS", "INSECURE"))
        return cls(token.strip(), tls, ca, certificate, key, insecure)

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS is used."""
        return self.tls or self.ca is not None or self.certificate is not None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files for gRPC. Raises InvalidConfig if one cannot be read, or if certificate or key is missing."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidConfig("client", ["a certificate needs its key, and a key its certificate"])
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata that each call to an address carries.

        Raises InvalidConfig if the token would travel to another host in plain text and insecure is not set.
        """
        if not self.token:
            return ()
        host = address.rpartition(":")[0]
        if not (self.is_encrypted or self.insecure or is_loopback(host)):
            raise InvalidConfig(
                "client", [f"the token would go to {host} in plain text: use TLS (--tls, --tls-ca), or --insecure"]
            )
        return (("authorization", f"Bearer {self.token}"),)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidConfig("client", [f"{path} cannot be read: {error.strerror}"]) from error
