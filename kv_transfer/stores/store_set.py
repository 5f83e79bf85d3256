"""The scheduler side of an engine's stores: decides which blocks are saved in which store, and which are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.connector.store_steps import BlockLoad, StoredBlock, StoreMetadata


class KVStoreScheduler(Protocol):
    """The scheduler side of one store. All calls come from the engine thread and return at once, without I/O."""

    def find(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first one on, the store can bring."""

    def choose_cached(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of the blocks, whose KV was just computed or received, that are to be saved now."""

    def choose_evicted(self, block_hash: bytes) -> bool:
        """Return whether to save this block, which the KV cache is about to forget."""

    def take_forgotten(self) -> Sequence[bytes]:
        """Remove and return the blocks that the store has given up since the last call."""

    def begin_load(self, block_hashes: Sequence[bytes]) -> None:
        """Keep these blocks, which find() has just counted, until end_load(): they are going to be loaded."""

    def end_load(self, block_hashes: Sequence[bytes], num_loaded: int) -> None:
        """End a load, tried or not. num_loaded: every rank has brought this many blocks, the first ones."""

    def clear(self) -> None:
        """Forget everything: what is stored is not wanted any more. No load is under way."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """The blocks that a request is going to load, or loads. stores: the index of each block's store"""

    stores: list[int]
    hashes: tuple[bytes, ...]


class StoreSet:
    """The stores of an engine, the nearest first; collects what the next step asks of the worker side.

    The object belongs to the engine thread. Invariant: a request's blocks are kept by their stores from reserve() to
    end().
    """

    def __init__(self, stores: Sequence[KVStoreScheduler]) -> None:
        self._stores = list(stores)
        self._dropped: list[tuple[int, bytes]] = []
        self._saves: dict[tuple[int, bytes], StoredBlock] = {}
        self._loads: list[BlockLoad] = []
        self._cancelled: list[str] = []
        self._reserved: dict[str, _Reserved] = {}

    def on_blocks_cached(self, block_hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Offer blocks whose KV was just computed or received to every store; save those that a store chooses."""
        for index, store in enumerate(self._stores):
            chosen = set(store.choose_cached(block_hashes))
            self._take_forgotten(index)
            for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
                if block_hash in chosen:
                    self._saves[index, block_hash] = StoredBlock(index, block_hash, block_id)

    def on_block_evicted(self, block_hash: bytes, block_id: int) -> None:
        """Offer a block that is being evicted to every store; it is overwritten in the next step at the earliest."""
        for index, store in enumerate(self._stores):
            is_wanted = store.choose_evicted(block_hash)
            self._take_forgotten(index)
            if is_wanted:
                self._saves[index, block_hash] = StoredBlock(index, block_hash, block_id)

    def _take_forgotten(self, index: int) -> None:
        """Drop the blocks that a store has given up; those that are not saved yet are never saved."""
        for block_hash in self._stores[index].take_forgotten():
            if self._saves.pop((index, block_hash), None) is None:
                self._dropped.append((index, block_hash))

    def reserve(self, request_id: str, block_hashes: Sequence[bytes]) -> int:
        """Reserve a load, and return how many of these blocks, from the first one on, stores can bring.

        The stores keep these blocks until end(). Nothing is reserved if the number is 0.
        """
        found = self._find(block_hashes)
        if found:
            hashes = tuple(block_hashes[: len(found)])
            self._reserved[request_id] = _Reserved(found, hashes)
            for index, wanted in _by_store(found, hashes):
                self._stores[index].begin_load(wanted)
        return len(found)

    def start(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Begin the load that was reserved, into these blocks of the KV cache."""
        reserved = self._reserved[request_id]
        blocks = tuple(map(StoredBlock, reserved.stores, reserved.hashes, block_ids))
        assert len(blocks) == len(reserved.hashes), "there is one block of the cache for each reserved one"
        self._loads.append(BlockLoad(request_id, blocks))

    def cancel(self, request_id: str) -> None:
        """Cancel a load; its report still comes."""
        self._cancelled.append(request_id)

    def end(self, request_id: str, num_blocks: int) -> None:
        """End a load, which has brought so many blocks; 0 if it was not started. Unknown ones are ignored."""
        reserved = self._reserved.pop(request_id, None)
        if reserved is None:
            return
        loaded = dict(_by_store(reserved.stores[:num_blocks], reserved.hashes))
        for index, hashes in _by_store(reserved.stores, reserved.hashes):
            self._stores[index].end_load(hashes, len(loaded.get(index, ())))

    @property
    def num_reserved(self) -> int:
        """The number of loads that are reserved or under way."""
        return len(self._reserved)

    def clear(self) -> None:
        """Forget every stored block. No load is under way."""
        for index, store in enumerate(self._stores):
            store.clear()
            self._take_forgotten(index)

    def _find(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the index of each block's store, from the first block on.

        The store that can bring most of the remaining blocks is chosen each time; of equal ones, the nearest.
        """
        found: list[int] = []
        while len(found) < len(block_hashes):
            rest = block_hashes[len(found) :]
            num_blocks, minus_index = max((store.find(rest), -index) for index, store in enumerate(self._stores))
            if not num_blocks:
                break
            found += [-minus_index] * num_blocks
        return found

    @property
    def has_orders(self) -> bool:
        """Whether loads have begun or were cancelled since the last take_metadata()."""
        return bool(self._loads or self._cancelled)

    def take_metadata(self) -> StoreMetadata | None:
        """Remove and return everything that was collected for the worker side; None if there is nothing."""
        metadata = StoreMetadata(
            tuple(self._dropped), tuple(self._saves.values()), tuple(self._loads), tuple(self._cancelled)
        )
        if metadata.is_empty():
            return None
        self._dropped, self._saves, self._loads, self._cancelled = [], {}, [], []
        return metadata


def _by_store(stores: Sequence[int], hashes: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
    """Group hashes by the index of their store. Hashes without a store, at the end of the list, are left out."""
    grouped: dict[int, list[bytes]] = {}
    for index, block_hash in zip(stores, hashes, strict=False):
        grouped.setdefault(index, []).append(block_hash)
    return list(grouped.items())
