"""The blocks of the KV cache: how often each is held, and which cached block is evicted next.

A block is held (ref_cnt > 0) or free. A free block may still be named in the prefix cache: it keeps its KV until it is
given away, and a hit takes it out of the middle of the free queue.

Invariants:
- a block is in the free queue iff ref_cnt == 0
- a block is in the cache iff it has a block_hash; no two blocks have the same
- only blocks that were found in the cache are shared, so at most one request holds a block without a hash; a step
  that copies it may hold it as well

Eviction: blocks are taken from the front of the free queue. Blocks without a hash are worth nothing and go there;
cached ones go to the back, the last blocks of a prefix before its first ones, so a prefix is lost from its end, the
least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.core.requests.block_hash import BlockHash
from actors.errors import IntegrityError


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of the KV cache.

    ref_cnt:  how many requests hold it
    position: position in its prefix, in blocks from 0, while the block is in the prefix cache
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    position: int = 0


class CacheEvents(Protocol):
    """Notes what enters and leaves the cache; a KVEventLog is one."""

    def store(self, block_hashes: Sequence[BlockHash], first_block: int) -> None:
        """Note that consecutive blocks entered the cache. first_block: position of the first one in its prefix"""

    def remove(self, block_hash: BlockHash) -> None:
        """Note that a block left the cache."""

    def clear(self) -> None:
        """Note that all blocks left the cache."""


class CacheObserver(Protocol):
    """Receives each block that enters the prefix cache, and each that is evicted from it."""

    def on_blocks_cached(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Note that these blocks entered the cache: their KV does not change until they are evicted."""

    def on_block_evicted(self, block_hash: BlockHash, block_id: int) -> None:
        """Note that a block goes to another holder, which writes it in the step being scheduled at the earliest."""

    def clear(self) -> None:
        """Note that the whole cache was reset: no block that was reported earlier is cached any more."""


class BlockPool:
    """All blocks of one engine's KV cache. Every operation costs O(1) per block that it names."""

    def __init__(
        self, num_blocks: int, events: CacheEvents | None = None, observer: CacheObserver | None = None
    ) -> None:
        """events: where the pool notes what enters and leaves the cache"""
        self._events = events
        self._observer = observer
        self.blocks = tuple(KVCacheBlock(block_id) for block_id in range(num_blocks))
        self._free: OrderedDict[int, KVCacheBlock] = OrderedDict((block.block_id, block) for block in self.blocks)
        self._cached: dict[BlockHash, KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that the prefix cache names, held ones included."""
        return len(self._cached)

    def find_longest_prefix(self, block_hashes: Sequence[BlockHash], max_num_blocks: int) -> list[KVCacheBlock]:
        """Return the cached blocks of the longest known prefix, at most max_num_blocks. Touches no block."""
        found = []
        for block_hash in block_hashes[:max_num_blocks]:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def is_cached(self, block_hash: BlockHash) -> bool:
        """Return whether the prefix cache names a block with this hash. Touches no block."""
        return block_hash in self._cached

    def find_held(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Return the cached block with this hash if somebody holds the block, else None. Touches no block."""
        block = self._cached.get(block_hash)
        return block if block is not None and block.ref_cnt else None

    def get_free_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue, and evict the cached ones among them.

        Raises IntegrityError if fewer than num_blocks are free: callers look at num_free_blocks first.
        """
        if num_blocks > len(self._free):
            raise IntegrityError(f"{num_blocks} blocks are asked for, and {len(self._free)} are free")
        return [self._take_first() for _ in range(num_blocks)]

    def _take_first(self) -> KVCacheBlock:
        _, block = self._free.popitem(last=False)
        if block.block_hash is not None:
            self._evict(block, block.block_hash)
        block.ref_cnt = 1
        return block

    def _evict(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        del self._cached[block_hash]
        if self._events is not None:
            self._events.remove(block_hash)
        if self._observer is not None:
            self._observer.on_block_evicted(block_hash, block.block_id)
        block.block_hash = None

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Evict these cached blocks; those that are free are the next to be given away."""
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block, block.block_hash)
                if block.ref_cnt == 0:
                    self._free.move_to_end(block.block_id, last=False)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take one more hold of each block; a free one leaves the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Release a request's blocks, given in token order. Raises IntegrityError if one is free already."""
        for block in reversed(blocks):
            if block.ref_cnt <= 0:
                raise IntegrityError(f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    self._free.move_to_end(block.block_id, last=False)

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash], first_block: int = 0
    ) -> None:
        """Name held blocks in the cache, now that all their KV is computed.

        first_block: position of the first one in its prefix

        A second block with the same content stays without a name: the first one serves the hits.
        """
        named: list[BlockHash] = []
        for position, (block, block_hash) in enumerate(zip(blocks, block_hashes, strict=True), first_block):
            if block.block_hash is None and block_hash not in self._cached:
                block.block_hash = block_hash
                block.position = position
                self._cached[block_hash] = block
                named.append(block_hash)
            elif named:
                self._note_stored(named, position)
                named = []
        if named:
            self._note_stored(named, first_block + len(blocks))

    def _note_stored(self, block_hashes: list[BlockHash], end: int) -> None:
        if self._events is not None:
            self._events.store(block_hashes, end - len(block_hashes))

    def cached_blocks(self, begin: int, end: int) -> list[KVCacheBlock]:
        """Return the blocks in the cache among those with the ids begin to end - 1."""
        return [block for block in self.blocks[begin:end] if block.block_hash is not None]

    def reset(self) -> None:
        """Forget every cached block, those that are held included."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self._events is not None:
            self._events.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant of this file does not hold."""
        free = self._free
        for block in self.blocks:
            if (block.block_id in free) != (block.ref_cnt == 0) or block.ref_cnt < 0:
                raise IntegrityError(f"block {block.block_id}: ref_cnt {block.ref_cnt} contradicts the free queue")
        for block_hash, block in self._cached.items():
            if block.block_hash != block_hash:
                raise IntegrityError(f"the cache names block {block.block_id}, which has another hash")
        named = [block.block_id for block in self.blocks if block.block_hash is not None]
        if len(named) != len(self._cached):
            raise IntegrityError(f"blocks {named} have a hash, but the cache maps {len(self._cached)} blocks")


def count_common_blocks(tables: Sequence[Sequence[KVCacheBlock]]) -> int:
    """Return how many blocks, from the first one, all these tables have in common; 0 for a single table.

    Requests that share a block share all before it: a hit is always a whole prefix.
    """
    if len(tables) < 2:
        return 0
    first, num_common = tables[0], len(tables[0])
    for blocks in tables[1:]:
        num_common = min(num_common, len(blocks))
        while num_common and blocks[num_common - 1] is not first[num_common - 1]:
            num_common -= 1
        if not num_common:
            break
    return num_common
