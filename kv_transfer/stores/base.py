"""The interface of a store, which keeps blocks outside the KV cache by their hashes, and brings them back.

A store has two sides, as the connector has. The scheduler side (KVStoreScheduler in store_set.py) decides, in the
engine thread, what is saved and what can be loaded; it never blocks. The worker side moves bytes. Each tensor-parallel
rank has one worker side, with the rank's part of every block, and a thread on which the worker side may block.

A block's hash stands for its tokens and everything before them, so the content under a hash never changes. A store may
lose blocks at any time, and may be slow: a block that a store does not bring, or not in time, is computed. A store
must not bring other bytes than were saved.
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
        """Forget a block, on the engine thread. Unknown blocks are ignored. No load of the block is under way."""

    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        """Return, on the engine thread, where to copy a block's bytes; None if the store cannot take the block now.

        The buffer should be pinned memory if the engine is on a GPU, or the engine waits for the copy.
        """

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        """Store a block, on the store's thread. The buffer holds the bytes, and belongs to the store again."""

    def load(self, block_hash: bytes) -> Tensor | None:
        """Return a block's bytes, on the store's thread; None if the store does not have the block.

        The bytes are valid until the next call on this thread.
        """

    def close(self) -> None:
        """Release everything; no other call is under way, and none follows."""


class KVStore(Protocol):
    """A store's class, which an entry point of the group `raypd.kv_stores` names; called without arguments."""

    def make_scheduler(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreScheduler:
        """Return the scheduler side, in the engine's process. Raises ValueError if the options are wrong.

        layout: of rank 0
        """

    def make_worker(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreWorker:
        """Return the worker side of one rank, in the rank's process. layout: of this rank"""
