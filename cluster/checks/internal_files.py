"""The check of the files with which processes of a cluster authenticate each other, before Ray and engines start.

Every process reads these files itself, at the same paths on every node. Without this check, a missing or unusable file
would only show when each engine starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.config import ClusterConfig
from cluster.settings.internal_tls import InternalTlsConfig
from kv_transfer.errors import SecretUnusable, TlsUnusable
from kv_transfer.trust.secret_file import read_secret_file
from kv_transfer.trust.tls import InternalTls, TlsFiles

_MAKE_ONE = "create it with `openssl rand -hex 32`, and copy it to every node, readable for raypd's user only"


@dataclass(frozen=True, slots=True)
class InternalFiles:
    """The files that the settings name; None for each secret that the controller draws itself.

    secret:         the setting cluster_secret_file
    block_hash_key: the setting block_hash_key_file
    tls:            the files of the setting internal_tls
    """

    secret: Path | None = None
    block_hash_key: Path | None = None
    tls: TlsFiles | None = None

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        """Return the files that a cluster with these settings reads on every node."""
        tls = config.internal_tls
        files = (
            TlsFiles(str(tls.ca), str(tls.certificate), str(tls.key)) if isinstance(tls, InternalTlsConfig) else None
        )
        return cls(config.cluster_secret_file, config.block_hash_key_file, files)

    def find_mistakes(self) -> list[str]:
        """Return why files cannot be used on this machine, each with its setting; empty if all can be used.

        The texts do not reveal the content of a file.
        """
        mistakes = []
        for setting, path in (("cluster_secret_file", self.secret), ("block_hash_key_file", self.block_hash_key)):
            if path is None:
                continue
            try:
                read_secret_file(path)
            except SecretUnusable as error:
                advice = "" if path.exists() else f"; {_MAKE_ONE}"
                mistakes.append(f"{setting}: {error}{advice}")
        if self.tls is not None:
            try:
                InternalTls(self.tls)
            except TlsUnusable as error:
                mistakes.append(str(error))
        return mistakes
