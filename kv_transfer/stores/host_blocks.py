"""Decides which evicted blocks the host tier keeps: its scheduler side, which moves no bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


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


def num_slots_within(cpu_cache_gib: float, size_bytes: int) -> int:
    """Return how many blocks of this size the tier holds. Raises ValueError if not even one fits."""
    num_slots = int(cpu_cache_gib * (1 << 30)) // size_bytes
    if num_slots < 1:
        raise ValueError(
            f"kv_transfer.cpu_cache_gib = {cpu_cache_gib:g} is too small for one block of {size_bytes} bytes: raise it"
        )
    return num_slots
