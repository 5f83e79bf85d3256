"""What happens to the prefix cache, for a router that keeps an index of who has which prefix.

The events are vLLM's: BlockStored, BlockRemoved, AllBlocksCleared. A reader that applies the batches in order knows
exactly which block hashes this engine can serve; a gap in the sequence numbers tells it to start anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from actors.core.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks can be found from now on.

    block_hashes:      in the order of the tokens
    parent_block_hash: of the block before the first one; None if that begins a prompt
    token_ids:         of all these blocks
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be found."""

    block_hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be found."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events since the last batch. sequence: 0, 1, 2 …; at_s: by the engine's monotonic clock."""

    sequence: int
    at_s: float
    events: list[KVCacheEvent]


@dataclass(slots=True)
class KVEventLog:
    """Collects events until they are taken."""

    _events: list[KVCacheEvent] = field(default_factory=list)
    _num_batches: int = 0

    def add(self, event: KVCacheEvent) -> None:
        """Note an event; a removal joins the one before it."""
        last = self._events[-1] if self._events else None
        if isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved):
            last.block_hashes.extend(event.block_hashes)
        else:
            self._events.append(event)

    def take(self, now_s: float) -> KVEventBatch | None:
        """Hand out what has happened since the last time, or None if nothing has."""
        if not self._events:
            return None
        events, self._events = self._events, []
        batch = KVEventBatch(self._num_batches, now_s, events)
        self._num_batches += 1
        return batch
