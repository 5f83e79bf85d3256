"""Events of the prefix cache, for routers that keep an index of the engines that have a prefix.

The events are vLLM's, without tokens: BlockStored, BlockRemoved, AllBlocksCleared. A reader that applies the batches in
order knows exactly which block hashes this engine can serve; a gap in the sequence numbers tells the reader to start
anew. A reader that comes too rarely finds a gap, since the log is bounded and drops its oldest events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from actors.core.requests.block_hash import BlockHash

MAX_EVENT_BLOCKS: Final = 1024
"""The most blocks of one event."""
MAX_BLOCKS: Final = 131_072
"""The most blocks and events together that are kept for a reader, in about 10 MB."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive full blocks of one prefix entered the prefix cache.

    first_block: position of the first one in its prefix, in blocks from 0
    """

    block_hashes: list[BlockHash]
    first_block: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks left the prefix cache."""

    block_hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset: it has no block."""

    block_hashes: tuple[()] = ()


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events since the last batch. sequence: number of the first event, counted from 0

    The next batch's sequence is this batch's sequence plus the number of its events. A larger one means that events
    were dropped between the two batches, and a reader starts anew.
    """

    sequence: int
    events: list[KVCacheEvent]


@dataclass(slots=True)
class KVEventLog:
    """Keeps events until they are taken, the newest only if nobody takes them.

    Invariant: num_blocks is the number of all kept events and of their blocks.
    """

    max_blocks: int = MAX_BLOCKS
    num_blocks: int = 0
    sequence: int = 0
    """The number of the oldest kept event, or of the next one if none is kept."""
    _events: deque[KVCacheEvent] = field(default_factory=deque)
    _last_removed: list[BlockHash] = field(default_factory=list)
    """The blocks of the newest event if it is a removal that can grow."""
    _is_growing: bool = False

    def store(self, block_hashes: Sequence[BlockHash], first_block: int) -> None:
        """Note that consecutive blocks of a prefix entered the cache; BlockStored tells what first_block is."""
        for begin in range(0, len(block_hashes), MAX_EVENT_BLOCKS):
            part = list(block_hashes[begin : begin + MAX_EVENT_BLOCKS])
            self._append(BlockStored(part, first_block + begin))

    def remove(self, block_hash: BlockHash) -> None:
        """Note that a block left the cache. Removals that follow each other are one event."""
        if self._is_growing and len(self._last_removed) < MAX_EVENT_BLOCKS:
            self._last_removed.append(block_hash)
            self.num_blocks += 1
            if self.num_blocks > self.max_blocks:
                self._drop_oldest()
            return
        event = BlockRemoved([block_hash])
        self._append(event)
        self._last_removed, self._is_growing = event.block_hashes, True

    def clear(self) -> None:
        """Note that all blocks left the cache."""
        self._append(AllBlocksCleared())

    def take(self) -> KVEventBatch | None:
        """Return the events since the last call, and forget them; None if there are none."""
        if not self._events:
            return None
        batch = KVEventBatch(self.sequence, list(self._events))
        self._events.clear()
        self._is_growing = False
        self.num_blocks = 0
        self.sequence += len(batch.events)
        return batch

    def _append(self, event: KVCacheEvent) -> None:
        self._is_growing = False
        self._events.append(event)
        self.num_blocks += 1 + len(event.block_hashes)
        while self.num_blocks > self.max_blocks:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.num_blocks -= 1 + len(self._events.popleft().block_hashes)
        self.sequence += 1
        self._is_growing &= bool(self._events)
