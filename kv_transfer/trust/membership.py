"""What a process of the cluster is given so that it can prove itself, and how it keeps that.

The controller hands TrustMaterial to each process in a call, after the process has started and before it listens: never
in arguments, in the environment or in a saved state. A process that has got nothing yet proves nothing and accepts
nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.errors import Untrusted
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import ClusterSecret, ClusterSecrets, KeySource, Purpose
from kv_transfer.trust.secret_file import FileSecrets


@dataclass(frozen=True, slots=True)
class TrustMaterial:
    """The secrets that a process is to accept.

    generation:  grows with each change, so that a late message does not bring back an older state
    secrets:     the current one first; empty if they are in a file
    secret_file: where each node has them; empty if they were drawn
    """

    generation: int
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    secret_file: str = ""

    @classmethod
    def draw(cls) -> TrustMaterial:
        """Return a new secret. Its generation is later than any that this host has made before."""
        return cls(time.time_ns(), (ClusterSecret.draw().reveal(),))


class Trust:
    """What this process accepts now. A KeySource; may be read and replaced from any thread."""

    def __init__(self, material: TrustMaterial | None = None) -> None:
        """Raises SecretUnusable."""
        self._lock = threading.Lock()
        self._material: TrustMaterial | None = None
        self._keys: KeySource | None = None
        self._others: dict[str, int] = {}
        self._listeners: list[Callable[[TrustMaterial], None]] = []
        if material is not None:
            self.use(material)

    @property
    def material(self) -> TrustMaterial | None:
        """What was given last; None before that."""
        return self._material

    @property
    def generation(self) -> int:
        """The generation of what was given last; 0 before that."""
        material = self._material
        return 0 if material is None else material.generation

    @property
    def settled_generation(self) -> int:
        """The oldest generation among this process and those that it passes secrets on to."""
        with self._lock:
            return min([self.generation, *self._others.values()])

    def note_other(self, name: str, generation: int) -> None:
        """Note what another process, to which this one passes secrets on, has taken."""
        with self._lock:
            self._others[name] = generation

    def use(self, material: TrustMaterial) -> None:
        """Accept these secrets from now on, unless they are older than what is here. Raises SecretUnusable."""
        with self._lock:
            if material.generation <= self.generation:
                return
            self._keys = _key_source(material)
            self._material = material
            listeners = list(self._listeners)
        for tell in listeners:
            tell(material)

    def follow(self, tell: Callable[[TrustMaterial], None]) -> None:
        """Call `tell` with what is here, if anything is, and with all that comes, on the thread that brings it."""
        with self._lock:
            self._listeners.append(tell)
            material = self._material
        if material is not None:
            tell(material)

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Implement KeySource. Raises Untrusted before anything was given."""
        if self._keys is None:
            raise Untrusted("this process has not been given the cluster's secret yet")
        return self._keys.keys(purpose)


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster as it introduces itself: its name and incarnation, and what it proves them with."""

    party: Party
    trust: Trust


def _key_source(material: TrustMaterial) -> KeySource:
    if material.secret_file:
        return FileSecrets(Path(material.secret_file))
    return ClusterSecrets([ClusterSecret(secret) for secret in material.secrets])
