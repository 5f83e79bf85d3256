"""The host tier: a store that keeps evicted blocks in the host's memory, and drops the least recently used first.

The scheduler side decides which blocks are kept. The worker sides do exactly what it decides, so all ranks hold the
same blocks. A block's bytes are copied once in each direction: they stay in the buffer that the engine copies into.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout


class HostMemoryScheduler:
    """The scheduler side of the host tier. Blocks that are being loaded are never dropped.

    Invariant: at most num_slots blocks are kept, the least recently used first in _blocks.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._loading: Counter[bytes] = Counter()
        self._forgotten: list[bytes] = []

    def find(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first one on, are kept."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self._blocks:
                return index
        return len(block_hashes)

    def choose_cached(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return no block: blocks that the KV cache still holds need no copy."""
        del block_hashes
        return ()

    def choose_evicted(self, block_hash: bytes) -> bool:
        """Make room for a block and return True; False if it is kept already, or every block is being loaded."""
        if block_hash in self._blocks:
            self._blocks.move_to_end(block_hash)
            return False
        if len(self._blocks) >= self._num_slots and not self._forget_oldest():
            return False
        self._blocks[block_hash] = None
        return True

    def _forget_oldest(self) -> bool:
        oldest = next((block_hash for block_hash in self._blocks if block_hash not in self._loading), None)
        if oldest is None:
            return False
        del self._blocks[oldest]
        self._forgotten.append(oldest)
        return True

    def take_forgotten(self) -> Sequence[bytes]:
        """Remove and return the blocks that were dropped since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def begin_load(self, block_hashes: Sequence[bytes]) -> None:
        """Keep these blocks until end_load()."""
        self._loading.update(block_hashes)
        for block_hash in reversed(block_hashes):
            # In reverse order, so that the last blocks of a prefix are evicted before its first blocks.
            self._blocks.move_to_end(block_hash)

    def end_load(self, block_hashes: Sequence[bytes], num_loaded: int) -> None:
        """Allow the blocks to be dropped again. num_loaded is ignored: this store never loses blocks by itself."""
        del num_loaded
        self._loading -= Counter(block_hashes)

    def clear(self) -> None:
        """Drop every block."""
        self._forgotten += self._blocks
        self._blocks.clear()


class HostMemoryWorker:
    """The worker side of the host tier: one rank's slots, [num_slots, block_size_bytes] uint8."""

    def __init__(self, num_slots: int, block_size_bytes: int, *, is_pinned: bool) -> None:
        self._slots = torch.empty((num_slots, block_size_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        self._free = list(range(num_slots))
        self._slot_of: dict[bytes, int] = {}

    def drop(self, block_hash: bytes) -> None:
        """Free the block's slot."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        """Return a free slot for the block; None if no slot is free, or the block has one already."""
        if not self._free or block_hash in self._slot_of:
            return None
        slot = self._slot_of[block_hash] = self._free.pop()
        return self._slots[slot]

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        """Do nothing: the block's bytes are in their slot already."""

    def load(self, block_hash: bytes) -> Tensor | None:
        """Return the block's slot, which is not reused while the load is under way; None if the block is not kept."""
        slot = self._slot_of.get(block_hash)
        return None if slot is None else self._slots[slot]

    def close(self) -> None:
        """Drop every block and the memory."""
        self._slot_of.clear()
        self._free.clear()
        del self._slots


class HostMemoryStore:
    """The host tier as a KVStore.

    Its options are cpu_cache_gib, for all ranks of the engine together, and is_on_gpu, which asks for pinned memory.
    """

    def make_scheduler(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> HostMemoryScheduler:
        """Return the scheduler side. Raises ValueError if not even one block fits."""
        return HostMemoryScheduler(num_host_slots(layout, float(options["cpu_cache_gib"])))

    def make_worker(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> HostMemoryWorker:
        """Return the worker side, and allocate its memory."""
        num_slots = num_host_slots(layout, float(options["cpu_cache_gib"]))
        return HostMemoryWorker(num_slots, layout.block_size_bytes, is_pinned=bool(options["is_on_gpu"]))


def num_host_slots(layout: KVCacheLayout, cpu_cache_gib: float) -> int:
    """Return how many blocks the tier holds, the same on every rank. Raises ValueError if not even one fits."""
    size_bytes = layout.block_size_bytes * layout.tp_size
    num_slots = int(cpu_cache_gib * (1 << 30)) // size_bytes
    if num_slots < 1:
        raise ValueError(
            f"kv_transfer.cpu_cache_gib = {cpu_cache_gib:g} is too small for one block of {size_bytes} bytes: raise it"
        )
    return num_slots
