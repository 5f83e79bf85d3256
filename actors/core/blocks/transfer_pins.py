"""The blocks that transfers without a request hold: answers to other engines' fetches, and embeddings of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.core.blocks.block_pool import BlockPool, KVCacheBlock
from kv_transfer.connector.keys import TransferKey


class PinnedBlocks:
    """The pinned blocks by the transfer that holds them. Preemption cannot free them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pinned: dict[TransferKey, list[KVCacheBlock]] = {}

    def __iter__(self) -> Iterator[tuple[TransferKey, list[KVCacheBlock]]]:
        """Iterate over the transfers, with the blocks of each."""
        return iter(self._pinned.items())

    def pin_cached(self, key: TransferKey, blocks: Sequence[KVCacheBlock]) -> None:
        """Hold cached blocks for a transfer."""
        self._pool.touch(blocks)
        self._pinned[key] = list(blocks)

    def pin_free(self, key: TransferKey, num_blocks: int) -> list[int]:
        """Take free blocks, for other bytes than KV, for a transfer; returns their ids."""
        self._pinned[key] = blocks = self._pool.get_free_blocks(num_blocks)
        return [block.block_id for block in blocks]

    def unpin(self, key: TransferKey) -> None:
        """Free the blocks of a transfer, without a fence: no step writes such blocks."""
        self._pool.free(self._pinned.pop(key))

    def num_pinned_by(self, key: TransferKey) -> int:
        """How many blocks a transfer holds."""
        return len(self._pinned.get(key, ()))

    def holders(self) -> set[TransferKey]:
        """The transfers that hold blocks."""
        return {key for key, blocks in self._pinned.items() if blocks}
