"""How a client says who it is, and whom it believes."""

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
    """What a client needs for an ingress that asks for it. Files are PEM.

    token:    the bearer token; "" for none
    tls:      encrypt; certificate authorities make it so too
    ca:       roots that the ingress's certificate must come from; None: the system's
    certificate, key: the client's own, for an ingress that asks for one (mutual TLS)
    insecure: send the token in plain text beyond loopback too
    """

    token: str = field(default="", repr=False)
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Credentials:
        """As RAYPD_TOKEN (or RAYPD_TOKEN_FILE), RAYPD_TLS, RAYPD_TLS_CA, _CERT and _KEY, and RAYPD_INSECURE say.

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
        """For gRPC. Raises InvalidConfig if a file cannot be used."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidConfig("client", ["a certificate needs its key, and a key its certificate"])
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What goes along with each call to this address. Raises InvalidConfig if others could read the token there."""
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
