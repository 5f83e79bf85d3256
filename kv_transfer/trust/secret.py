"""The cluster's secret: 32 random bytes that every process of the cluster knows and nobody else does.

A secret never travels on a connection and is never used as it is: for each purpose a key is derived from it, so that
what proves membership for one purpose proves nothing for another. Several secrets can be accepted at a time, the
current one first: that is how a secret is replaced while the cluster serves.

Invariant: a secret's bytes leave its object only through reveal(). repr() hides them, and pickle refuses them, so that
they do not get into a log line, an error or a saved state by accident.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NoReturn, Protocol, Self

NUM_SECRET_BYTES: Final = 32
MAX_ACCEPTED: Final = 8
"""How many secrets can be accepted at a time."""
_DERIVATION: Final = b"raypd key derivation 1: "


class Purpose(StrEnum):
    """The purpose of a connection. Each purpose has a key of its own."""

    SESSION = "session"
    CONTROL = "control"
    ENCODE = "encode"
    RANK = "rank"
    DATA_LINK = "data link"
    SHARED_MEMORY = "shared memory"
    TENSOR_PARALLEL = "tensor parallel"


class KeySource(Protocol):
    """Something that has keys for handshakes."""

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys that are accepted for this purpose now, the current one first: 1 to MAX_ACCEPTED."""


class ClusterSecret:
    """One secret."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) != NUM_SECRET_BYTES:
            raise ValueError(f"a cluster's secret has {NUM_SECRET_BYTES} bytes, not {len(value)}")
        self._value = value

    @classmethod
    def draw(cls) -> Self:
        """Return a new, random secret."""
        return cls(secrets.token_bytes(NUM_SECRET_BYTES))

    def reveal(self) -> bytes:
        """Return the secret's bytes, for a process of the cluster that is to know them."""
        return self._value

    def key(self, purpose: Purpose) -> bytes:
        """Derive the key for a purpose (HKDF-Expand of RFC 5869 for one block; the secret is uniformly random)."""
        return derive_key(self._value, purpose)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSecret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "ClusterSecret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster's secret is not pickled; hand reveal() to a process that is to know it")


class ClusterSecrets:
    """The secrets that this process accepts now. A KeySource; may be read and replaced from any thread."""

    def __init__(self, accepted: Sequence[ClusterSecret]) -> None:
        """accepted: the current one first."""
        self._accepted = _checked(accepted)

    @classmethod
    def draw(cls) -> Self:
        """Return a new, random secret, alone."""
        return cls([ClusterSecret.draw()])

    @property
    def accepted(self) -> tuple[ClusterSecret, ...]:
        """The secrets that are accepted, the current one first."""
        return self._accepted

    def replace(self, accepted: Sequence[ClusterSecret]) -> None:
        """Accept these from now on. Connections that are open stay."""
        self._accepted = _checked(accepted)

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Implement KeySource."""
        return tuple(secret.key(purpose) for secret in self._accepted)

    def __repr__(self) -> str:
        return f"ClusterSecrets({len(self._accepted)} hidden)"


class SessionKey:
    """A key that only the two ends of one proven connection have. A KeySource for connections that belong to it."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Implement KeySource."""
        return (derive_key(self._value, purpose),)

    def tag(self, label: bytes) -> bytes:
        """Return 32 bytes by which the other end sees that this end has the key; label: what they are for."""
        return hmac.digest(self._value, b"tag: " + label, hashlib.sha256)

    def __repr__(self) -> str:
        return "SessionKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a connection's key is not pickled: it stays with its two ends")


def derive_key(value: bytes, purpose: Purpose) -> bytes:
    """Derive a purpose's key from 32 uniformly random bytes."""
    return hmac.digest(value, _DERIVATION + purpose.encode() + b"\x01", hashlib.sha256)


def _checked(accepted: Sequence[ClusterSecret]) -> tuple[ClusterSecret, ...]:
    if not 1 <= len(accepted) <= MAX_ACCEPTED:
        raise ValueError(f"1 to {MAX_ACCEPTED} secrets can be accepted at a time, not {len(accepted)}")
    return tuple(accepted)
