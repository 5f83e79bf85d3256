"""The settings of TLS within the cluster."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


def require_absolute(path: Path) -> Path:
    """Refuse relative paths: processes run in different directories, so each would look for another file."""
    if not path.is_absolute():
        raise ValueError("it has to be an absolute path, which is the same on every node")
    return path


class InternalTlsConfig(BaseModel):
    """Certificate files (PEM) for connections within the cluster, at the same paths on every node.

    When files change, new connections use the new ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path = Field(
        description="Certificate of the authority (CA) whose certificates processes accept. The authority must not "
        "sign certificates for anything but this cluster."
    )
    certificate: Path = Field(
        description="Certificate for the DNS name raypd.internal, valid for servers and clients; all processes of the "
        "cluster use the same one."
    )
    key: Path = Field(
        description="Private key of the certificate. The file must not be accessible to users other than its owner "
        "and group."
    )

    @field_validator("ca", "certificate", "key")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        return require_absolute(path)
