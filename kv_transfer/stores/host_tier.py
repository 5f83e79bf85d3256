"""The host tier: a store that keeps evicted blocks in the host's memory, and drops the least recently used first.

The scheduler side decides which blocks are kept. The worker sides do exactly what it decides, so all ranks hold the
same blocks. A block's bytes are copied once in each direction: they stay in the buffer that the engine copies into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout
from kv_transfer.stores.host_blocks import HostMemoryScheduler, num_slots_within


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
    return num_slots_within(cpu_cache_gib, layout.block_size_bytes * layout.tp_size)
