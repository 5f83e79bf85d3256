"""Snapshots of recurrent states, with which models with recurrent layers have prefix hits.

KV of a prefix is of no use without the state after it. So requests copy their state into other blocks of the pool, a
*snapshot*, where another request is likely to go on:

- after the last full block of a prompt that leaves a token to compute: for the same prompt, and for what continues it
- where a prompt leaves the blocks that are cached of other prompts: what two prompts begin with, a third may have too

Chunks end there, and the step with the next chunk copies the request's slot before it computes. A hit is as long as the
longest prefix with a snapshot; the step that admits the request copies the snapshot into the request's slot. A request
that loses its blocks where one of them ends leaves its slot as a snapshot (steps/preemption.py).

The prefix cache names each block of a snapshot by the hash of the block after which it was taken, and by its place in
the slot. A snapshot is held only by the steps that write or read it, and nobody changes it. Otherwise its blocks are
free, and are evicted like all cached blocks, least recently used first. So snapshots take no block from a request:
one that finds too few free blocks for a copy gets the snapshot itself as its slot, and the cache forgets the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from actors.core.blocks.block_pool import BlockPool, KVCacheBlock
from actors.core.requests.block_hash import HASH_SIZE_BYTES, BlockHash
from actors.core.requests.request import Request
from actors.errors import IntegrityError

_PLACE_SIZE_BYTES: Final = 4


class StateSnapshots:
    """The snapshots in one pool, and where those of the requests that compute their prompts are due."""

    def __init__(self, pool: BlockPool, num_blocks: int, block_size: int) -> None:
        """num_blocks: of a slot, and so of a snapshot"""
        self._pool = pool
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._due: dict[str, tuple[int, ...]] = {}
        """After how many tokens the snapshots of each request are due."""

    def find(self, block_hash: BlockHash) -> list[KVCacheBlock]:
        """Return the snapshot that was taken after the block of this hash; empty if the cache does not have all of it.

        Touches no block.
        """
        if not self._pool.find_longest_prefix([_name(block_hash, 0)], 1):
            return []
        blocks = self._pool.find_longest_prefix(self.names_after(block_hash), self._num_blocks)
        return blocks if len(blocks) == self._num_blocks else []

    def cut_hit(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return the cached blocks of a prefix up to the last one after which a snapshot was taken."""
        for end in range(len(blocks), 0, -1):
            block_hash = blocks[end - 1].block_hash
            if block_hash is not None and self.find(block_hash):
                return blocks[:end]
        return []

    def hold(self, hit: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take hold of the snapshot after a hit, and return it; empty without a hit.

        Raises IntegrityError if there is no snapshot: then cut_hit() did not give the hit.
        """
        if not hit:
            return []
        last_hash = hit[-1].block_hash
        snapshot = [] if last_hash is None else self.find(last_hash)
        if not snapshot:
            raise IntegrityError(f"a hit of {len(hit)} blocks ends where no snapshot was taken")
        self._pool.touch(snapshot)
        return snapshot

    def give_away(self, snapshot: Sequence[KVCacheBlock], num_left: int) -> bool:
        """Make the blocks of a snapshot, which hold() returned, blocks of a slot, if there are too few for a copy.

        num_left: how many blocks were free before hold(), beyond those that the request and its slot need
        """
        # A snapshot that another step uses already was not free either before it was held.
        if not snapshot or snapshot[0].ref_cnt > 1 or num_left >= self._num_blocks:
            return False
        self._pool.forget(snapshot)
        return True

    def plan(self, request: Request, num_computed_tokens: int) -> None:
        """Decide where snapshots of a request are due, which is admitted with so many computed tokens."""
        if not request.reads_prefix_cache:
            return
        request.extend_block_hashes()
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        num_shared = len(self._pool.find_longest_prefix(request.block_hashes, num_blocks))
        ends = (num_shared * self._block_size, num_blocks * self._block_size)
        self._due[request.request_id] = tuple(sorted({end for end in ends if end > num_computed_tokens}))

    def cut_chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of a chunk's tokens come before the next snapshot that is due."""
        for end in self._due.get(request.request_id, ()):
            if end > num_computed_tokens:
                return min(num_new_tokens, end - num_computed_tokens)
        return num_new_tokens

    def take(self, request: Request, num_spare_blocks: int) -> list[KVCacheBlock]:
        """Return blocks for a snapshot of a request's state; empty if none is due, or if there is one already.

        num_spare_blocks: how many blocks have to stay free

        The blocks have their names from now on. The caller holds them, and has the state copied into them by the next
        step before it computes anything, so that later steps find it there.
        """
        num_tokens = request.num_computed_tokens
        if num_tokens not in self._due.get(request.request_id, ()):
            return []
        block_hash = request.block_hashes[num_tokens // self._block_size - 1]
        if self.find(block_hash) or self._pool.num_free_blocks < self._num_blocks + num_spare_blocks:
            return []
        blocks = self._pool.get_free_blocks(self._num_blocks)
        self._name_blocks(blocks, block_hash, num_tokens // self._block_size - 1)
        return blocks

    def leave(self, slot: Sequence[KVCacheBlock], block_hash: BlockHash, position: int) -> None:
        """Make a slot a snapshot, unless there is one already. The caller frees the slot, which nobody writes any more.

        block_hash, position: of the block at whose end the state in the slot is; position: in blocks from 0
        """
        if not self.find(block_hash):
            self._name_blocks(slot, block_hash, position)

    def names_after(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the blocks of the snapshot that is, or would be, after the block of this hash."""
        return [_name(block_hash, place) for place in range(self._num_blocks)]

    def forget_request(self, request_id: str) -> None:
        """Expect no more snapshots of a request that has no slot any more."""
        self._due.pop(request_id, None)

    def _name_blocks(self, blocks: Sequence[KVCacheBlock], block_hash: BlockHash, position: int) -> None:
        names = self.names_after(block_hash)
        # What is left of an older snapshot may differ in its last bits, since other chunks led to it.
        for name in names:
            self._pool.forget(self._pool.find_longest_prefix([name], 1))
        self._pool.cache_full_blocks(blocks, names, position)


def _name(block_hash: BlockHash, place: int) -> BlockHash:
    """Return the name of one block of a snapshot, which no block of tokens has, since their names are shorter."""
    return block_hash + place.to_bytes(_PLACE_SIZE_BYTES, "little")


def end_of_snapshot(name: BlockHash, place: int | None = None) -> BlockHash | None:
    """Return the hash of the block after which the snapshot was taken to which a block of this name belongs.

    place: in the snapshot, if only that block's name counts
    Returns None for the name of a block of tokens, or of another place.
    """
    end = name[:HASH_SIZE_BYTES]
    if name == end or (place is not None and name != _name(end, place)):
        return None
    return end
