"""What a store is: a place outside of the KV cache that keeps blocks by their hash, and brings them back.

A store has two sides, as the connector has. The scheduler side decides, in the engine thread: what is saved, what
could be loaded. It never blocks. The worker side moves bytes, one for each tensor-parallel rank, each with the rank's
own part of every block; it has a thread of its own, on which it may block.

A block's hash stands for its tokens and everything before them, so what is stored under a hash never changes. Nothing
that a store does can make an answer wrong or a request hang: a block that it does not bring is computed, and so is what
it does not bring in time. It may lose blocks whenever it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kv_transfer.layout import KVCacheLayout


class KVStoreScheduler(Protocol):
    """One store's bookkeeping. All calls come from the engine thread and return at once, without I/O."""

    def find(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first one on, it can bring."""

    def choose_cached(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Which of these blocks, whose KV was just computed or received, are to be saved now."""

    def choose_evicted(self, block_hash: bytes) -> bool:
        """Whether this block, which the KV cache is about to forget, is to be saved."""

    def take_forgotten(self) -> Sequence[bytes]:
        """The blocks that it gave up since the last time, for others or for good."""

    def begin_load(self, block_hashes: Sequence[bytes]) -> None:
        """These, which find() has just named, are going to be loaded: not to be forgotten before that is over."""

    def end_load(self, block_hashes: Sequence[bytes], num_loaded: int) -> None:
        """That is over; the first so many were brought by every rank. It need not have been tried at all."""

    def clear(self) -> None:
        """Forget everything: what is stored is not wanted any more. No load is under way."""


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
    """What an entry point of the group `raypd.kv_stores` names: a class of this shape, made without arguments."""

    def make_scheduler(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreScheduler:
        """In the engine's process. layout: rank 0's. Raises ValueError if the options are wrong."""

    def make_worker(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> KVStoreWorker:
        """In each rank's process. layout: the rank's own."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, in one store (its place in the list of stores) and in the KV cache."""

    store: int
    block_hash: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Scheduler -> worker: fill these blocks, the request's next ones after those that it has."""

    request_id: str
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """What one step asks of the stores, in this order.

    dropped:    (store, block hash)
    saves:      copied out before anything of this step, or later, writes these blocks
    loads, cancelled_loads: by request id
    """

    dropped: tuple[tuple[int, bytes], ...] = ()
    saves: tuple[StoredBlock, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    cancelled_loads: tuple[str, ...] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.dropped or self.saves or self.loads or self.cancelled_loads)


@dataclass(slots=True)
class StoreStats:
    """Counters of one rank's stores since they started, and how long loads took."""

    num_saved_blocks: int = 0
    num_unsaved_blocks: int = 0
    """Blocks that a store had no room, or no time, for."""
    num_loaded_blocks: int = 0
    num_missing_blocks: int = 0
    """Blocks that were to be loaded and did not come."""
    num_loaded_bytes: int = 0
    load_s: float = 0.0
