"""The host tier: blocks that the KV cache evicts are kept in this host's memory, the least recently used lost first.

The scheduler side knows which hash is there; the worker sides follow it to the letter, so all ranks hold the same
blocks. A block's bytes are copied once each way: the buffer that the engine copies into is where they stay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout


class HostMemoryScheduler:
    """Least recently used blocks first out; those that are being loaded stay."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._loading: Counter[bytes] = Counter()
        self._forgotten: list[bytes] = []

    def find(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first one on, are here."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self._blocks:
                return index
        return len(block_hashes)

    def choose_cached(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """None: what the KV cache still holds needs no second place."""
        del block_hashes
        return ()

    def choose_evicted(self, block_hash: bytes) -> bool:
        """Make room for it, unless it is here already, or everything is being loaded."""
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
        """Return the blocks whose slots were given to others since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def begin_load(self, block_hashes: Sequence[bytes]) -> None:
        """They stay until it is over."""
        self._loading.update(block_hashes)
        for block_hash in reversed(block_hashes):
            # The last blocks of a prefix are worth less than its first ones.
            self._blocks.move_to_end(block_hash)

    def end_load(self, block_hashes: Sequence[bytes], num_loaded: int) -> None:
        """Nothing is lost here by itself, so nothing is learnt from it."""
        del num_loaded
        self._loading -= Counter(block_hashes)

    def clear(self) -> None:
        """Forget all."""
        self._forgotten += self._blocks
        self._blocks.clear()


class HostMemoryWorker:
    """One rank's slots: [num_slots, block_size_bytes] uint8."""

    def __init__(self, num_slots: int, block_size_bytes: int, *, is_pinned: bool) -> None:
        self._slots = torch.empty((num_slots, block_size_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        self._free = list(range(num_slots))
        self._slot_of: dict[bytes, int] = {}

    def drop(self, block_hash: bytes) -> None:
        """Its slot is free."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        """A slot of its own; None only if the scheduler side asks for more than there are."""
        if not self._free or block_hash in self._slot_of:
            return None
        slot = self._slot_of[block_hash] = self._free.pop()
        return self._slots[slot]

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        """It is where it stays."""

    def load(self, block_hash: bytes) -> Tensor | None:
        """Its slot, which is not given away while the load is under way."""
        slot = self._slot_of.get(block_hash)
        return None if slot is None else self._slots[slot]

    def close(self) -> None:
        """The memory goes with the last reference."""
        self._slot_of.clear()
        self._free.clear()
        del self._slots


class HostMemoryStore:
    """options: cpu_cache_gib, for all ranks of the engine together; is_on_gpu, for pinned memory."""

    def make_scheduler(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> HostMemoryScheduler:
        """Raises ValueError if not one block fits."""
        return HostMemoryScheduler(num_host_slots(layout, float(options["cpu_cache_gib"])))

    def make_worker(self, layout: KVCacheLayout, options: Mapping[str, Any]) -> HostMemoryWorker:
        """Takes the memory."""
        num_slots = num_host_slots(layout, float(options["cpu_cache_gib"]))
        return HostMemoryWorker(num_slots, layout.block_size_bytes, is_pinned=bool(options["is_on_gpu"]))


def num_host_slots(layout: KVCacheLayout, cpu_cache_gib: float) -> int:
    """How many blocks the tier holds: the same on every rank. Raises ValueError if not one fits."""
    size_bytes = layout.block_size_bytes * layout.tp_size
    num_slots = int(cpu_cache_gib * (1 << 30)) // size_bytes
    if num_slots < 1:
        raise ValueError(f"cpu_cache_gib = {cpu_cache_gib:g} does not hold one block of {size_bytes} bytes")
    return num_slots
