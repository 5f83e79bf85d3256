"""The cluster's secret: 32 random bytes that every process of the cluster knows, and no other process.

A secret never travels on a connection, and is never used itself: a key is derived from it for each purpose, so that a
proof for one purpose proves nothing for another. A process can accept several secrets at a time, the current one first;
so a secret can be replaced while the cluster serves.

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
    """The purpose of a connection. Each purpose has keys of its own."""

    SESSION = "session"
    CONTROL = "control"
    ENCODE = "encode"
    RANK = "rank"
    DATA_LINK = "data link"
    SHARED_MEMORY = "shared memory"
    TENSOR_PARALLEL = "tensor parallel"


class KeySource(Protocol):
    """An object that has keys for handshakes."""

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys that are accepted for this purpose now, the current one first: 1 to MAX_ACCEPTED."""


class ClusterSecret:
    """One secret of the cluster. Two objects with the same bytes are equal."""

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
        """Return the secret's bytes, in order to hand them to a process of the cluster."""
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
        raise TypeError("a cluster's secret is not pickled; hand reveal() to a process that has to know the secret")


class ClusterSecrets:
    """The secrets that this process accepts now, a KeySource. Any thread may read and replace them."""

    def __init__(self, accepted: Sequence[ClusterSecret]) -> None:
        """accepted: 1 to MAX_ACCEPTED secrets, the current one first. Raises ValueError."""
        self._accepted = _checked(accepted)

    @classmethod
    def draw(cls) -> Self:
        """Return an object that accepts one new, random secret."""
        return cls([ClusterSecret.draw()])

    @property
    def accepted(self) -> tuple[ClusterSecret, ...]:
        """The secrets that are accepted, the current one first."""
        return self._accepted

    def replace(self, accepted: Sequence[ClusterSecret]) -> None:
        """Accept these secrets, and no others, from now on. Open connections stay. Raises ValueError."""
        self._accepted = _checked(accepted)

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys for a purpose; see KeySource."""
        return tuple(secret.key(purpose) for secret in self._accepted)

    def __repr__(self) -> str:
        return f"ClusterSecrets({len(self._accepted)} hidden)"


class SessionKey:
    """A key that only the two ends of one proven connection have: a KeySource for further connections between them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the key for a purpose; see KeySource."""
        return (derive_key(self._value, purpose),)

    def tag(self, label: bytes) -> bytes:
        """Return 32 bytes that prove to the other end that this end has the key. label: names what they are for"""
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
