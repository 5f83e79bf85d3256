"""The blocks that were freed while steps were under way: they go back into the pool when these steps are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from actors.core.blocks.block_pool import BlockPool, KVCacheBlock


class FencedBlocks:
    """Blocks that no request holds and that are not free, since a step under way may still read or write them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._last_step_begun = 0
        self._last_step_over = 0
        self._fenced: deque[tuple[int, Sequence[KVCacheBlock]]] = deque()

    def __len__(self) -> int:
        """Return the number of blocks; shared ones may be counted twice."""
        return sum(len(blocks) for _, blocks in self._fenced)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Iterate over the blocks, one for each hold of a step."""
        for _, blocks in self._fenced:
            yield from blocks

    def begin_step(self, step_index: int, held: Sequence[KVCacheBlock]) -> None:
        """Note that a step begins, which holds these blocks until it is over. step_index: 1, 2, 3 …"""
        self._last_step_begun = step_index
        if held:
            self._fenced.append((step_index, held))

    def end_step(self, step_index: int) -> None:
        """Note that a step, and every step before it, is over: the blocks fenced for these steps are freed."""
        self._last_step_over = step_index
        while self._fenced and self._fenced[0][0] <= step_index:
            self._pool.free(self._fenced.popleft()[1])

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks, or fence them while steps are under way."""
        if self._last_step_begun > self._last_step_over:
            self._fenced.append((self._last_step_begun, blocks))
        else:
            self._pool.free(blocks)
