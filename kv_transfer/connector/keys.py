"""The names of transfers inside one engine.

A step's metadata and the worker side's reports name a transfer by its key. Two engines that take part in one transfer
have different keys for it; between them it has its transfer id.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kv_transfer.message_ranges import Count, WireName


class TransferKind(StrEnum):
    """The purpose of a transfer."""

    HANDOFF = "handoff"
    """The KV of a request's prompt, from the engine that prefills it to the one that decodes it."""
    PREFIX_FETCH = "prefix_fetch"
    """A request's prefix, out of another engine's cache."""
    PREFIX_ANSWER = "prefix_answer"
    """The other end of a prefix fetch: cached blocks are sent to the engine that wants them."""
    BYTES_FETCH = "bytes_fetch"
    """Bytes that are no KV, from another engine (sides/staged_bytes.py)."""
    BYTES_ANSWER = "bytes_answer"
    """The other end of a fetch of bytes."""


class TransferKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of a transfer, or of the part of a transfer that moves between two ranks.

    Invariant: no two transfers of an engine have the same key at a time. The scheduler does not accept a request's id
    again while the request's blocks are held, and answers each fetch once.

    name: the request's id, for a handoff and a prefix fetch; the transfer's own id, for the other kinds
    part: the peer's rank; None: the whole transfer
    """

    kind: TransferKind
    name: WireName
    part: Count | None = None

    @classmethod
    def of_handoff(cls, request_id: str) -> TransferKey:
        """Return the key of a request's handoff, at either end."""
        return cls(TransferKind.HANDOFF, request_id)

    def of_part(self, rank: int) -> TransferKey:
        """Return the key of the part that moves between this rank and a peer's rank."""
        return TransferKey(self.kind, self.name, rank)

    @property
    def whole(self) -> TransferKey:
        """The key of the transfer that this part belongs to."""
        return self if self.part is None else TransferKey(self.kind, self.name)

    def __str__(self) -> str:
        part = "" if self.part is None else f", rank {self.part}"
        return f"{self.name} ({self.kind}{part})"
