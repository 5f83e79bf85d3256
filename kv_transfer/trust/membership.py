"""Keeps the secrets by which a process of the cluster proves itself.

The controller hands TrustMaterial to each process in a call, after the process has started and before it listens: never
in arguments, in the environment or in a saved state. A process that has no material yet can prove nothing, and accepts
no connection.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.errors import Untrusted
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import NUM_SECRET_BYTES, ClusterSecret, ClusterSecrets, KeySource, Purpose
from kv_transfer.trust.secret_file import FileSecrets, read_secret_file
from kv_transfer.trust.tls import InternalTls, TlsFiles, TlsMaterial


@dataclass(frozen=True, slots=True)
class TrustMaterial:
    """The secrets that a process has to accept, and the keys that never change while the cluster exists.

    generation:          grows with each change, so that a late message does not bring back an older state
    secrets:             the current one first; empty if they are in a file
    secret_file:         path of the file of secrets on each node; empty if the secrets were drawn
    block_hash_key:      32 bytes; empty if the key is in a file
    block_hash_key_file: path of the file with the key of block hashes on each node; empty if the key was drawn
    tls:                 encrypts connections within the cluster; None: they are not encrypted
    """

    generation: int
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    secret_file: str = ""
    block_hash_key: bytes = field(default=b"", repr=False)
    block_hash_key_file: str = ""
    tls: TlsMaterial | TlsFiles | None = None

    @classmethod
    def draw(cls) -> TrustMaterial:
        """Return new random secrets. Their generation is later than any that this host has drawn before."""
        return cls(
            time.time_ns(), (ClusterSecret.draw().reveal(),), block_hash_key=secrets.token_bytes(NUM_SECRET_BYTES)
        )


class Trust:
    """The keys that this process accepts now, a KeySource. Any thread may read and replace them."""

    def __init__(self, material: TrustMaterial | None = None) -> None:
        """material: used at once, if it is given. Raises SecretUnusable or TlsUnusable."""
        self._lock = threading.Lock()
        self._material: TrustMaterial | None = None
        self._keys: KeySource | None = None
        self._block_hash_key = b""
        self._tls: InternalTls | None = None
        self._others: dict[str, int] = {}
        self._listeners: list[Callable[[TrustMaterial], None]] = []
        if material is not None:
            self.use(material)

    @property
    def material(self) -> TrustMaterial | None:
        """Return the material that was given last; None before that."""
        return self._material

    @property
    def generation(self) -> int:
        """The generation of the material that was given last; 0 before that."""
        material = self._material
        return 0 if material is None else material.generation

    @property
    def settled_generation(self) -> int:
        """The oldest generation among this process and those that it passes secrets on to."""
        with self._lock:
            return min([self.generation, *self._others.values()])

    def note_other(self, name: str, generation: int) -> None:
        """Note which generation another process, to which this one passes secrets on, has taken."""
        with self._lock:
            self._others[name] = generation

    def use(self, material: TrustMaterial) -> None:
        """Accept these secrets from now on; ignore them unless their generation is newer than the present one.

        The key of block hashes and the certificates stay those that came first. Raises SecretUnusable or TlsUnusable.
        """
        with self._lock:
            if material.generation <= self.generation:
                return
            keys = _key_source(material)
            if self._material is None:
                self._block_hash_key = _block_hash_key(material)
                self._tls = None if material.tls is None else InternalTls(material.tls)
            self._keys = keys
            self._material = material
            listeners = list(self._listeners)
        for tell in listeners:
            tell(material)

    def follow(self, tell: Callable[[TrustMaterial], None]) -> None:
        """Call `tell` with the present material, if there is any, and later with each new one, on use()'s thread."""
        with self._lock:
            self._listeners.append(tell)
            material = self._material
        if material is not None:
            tell(material)

    @property
    def block_hash_key(self) -> bytes:
        """The key of the cluster's block hashes, 32 bytes. Raises Untrusted before any material was given."""
        if not self._block_hash_key:
            raise Untrusted("this process has not been given the cluster's key of block hashes")
        return self._block_hash_key

    @property
    def tls(self) -> InternalTls | None:
        """Return the certificates that encrypt connections within the cluster; None: they are not encrypted."""
        return self._tls

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys for a purpose; see KeySource. Raises Untrusted before any material was given."""
        if self._keys is None:
            raise Untrusted("this process has not been given the cluster's secret yet")
        return self._keys.keys(purpose)


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster as it introduces itself: its name and incarnation, and the keys that prove them."""

    party: Party
    trust: Trust


def _block_hash_key(material: TrustMaterial) -> bytes:
    if material.block_hash_key_file:
        return read_secret_file(Path(material.block_hash_key_file))[0].reveal()
    return material.block_hash_key


def _key_source(material: TrustMaterial) -> KeySource:
    if material.secret_file:
        return FileSecrets(Path(material.secret_file))
    return ClusterSecrets([ClusterSecret(secret) for secret in material.secrets])
