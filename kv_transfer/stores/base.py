"""The interface of a store, which keeps blocks outside of the KV cache by their hash, and brings them back.

A store has two sides, as the connector has. The scheduler side decides, in the engine thread: what is saved, what
could be loaded. It never blocks. The worker side moves bytes, one for each tensor-parallel rank, each with the rank's
own part of every block; it has a thread of its own, on which it may block.

A block's hash stands for its tokens and everything before them, so what is stored under a hash never changes. Nothing
that a store does can make an answer wrong or a request hang: a block that it does not bring is computed, and so is what
it does not bring in time. It may lose blocks whenever it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from kv_transfer.layout import KVCacheLayout
from kv_transfer.stores.store_set import KVStoreScheduler


class KVStoreWorker(Protocol):
    """One rank's part of a store. A block is [block_size_bytes] uint8, on the CPU."""

    def drop(self, block_hash: bytes) -> None:
        """Engine thread: forget a block. Unknown ones are ignored. No load of it is under way."""

    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        """Engine thread: where the block's bytes are to be copied; None if the store cannot take it now.

        On a GPU it should be pinned, or the engine waits for the copy.
        """

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        """Store thread: the buffer holds the bytes. It belongs to the store again."""

    def load(self, block_hash: bytes) -> Tensor | None:
        """Store thread: the block's bytes, valid until the next call on this thread; None if it does not have it."""

    def close(self) -> None:
        """Give everything back; no other call is under way, and none follows."""


class KVStore(Protocol):
    """The class that an entry point of the group `raypd.kv_stores` names; it is made without arguments."""

    def make_scheduler(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreScheduler:
        """In the engine's process. layout: rank 0's. Raises ValueError if the options are wrong."""

    def make_worker(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreWorker:
        """In each rank's process. layout: the rank's own."""
