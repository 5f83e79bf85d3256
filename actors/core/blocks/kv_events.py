"""Events of the prefix cache, for a router that keeps an index of the engines that have a prefix.

The events are vLLM's: BlockStored, BlockRemoved, AllBlocksCleared. A reader that applies the batches in order knows
exactly which block hashes this engine can serve; a gap in the sequence numbers tells the reader to start anew. A reader
that comes too rarely finds a gap, since the log is bounded and drops its oldest events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from actors.core.requests.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks entered the prefix cache.

    block_hashes:      in the order of the tokens
    parent_block_hash: hash of the block before the first one; None if the first one begins a prompt
    token_ids:         the tokens of all these blocks, in order
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks left the prefix cache."""

    block_hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset: it has no block."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


MAX_EVENTS: Final = 16_384
"""Largest number of events that are kept for a reader."""
MAX_SIZE_BYTES: Final = 16 << 20
"""Largest estimated size of the kept events together."""
_EVENT_SIZE_BYTES: Final = 200
_HASH_SIZE_BYTES: Final = 64
_TOKEN_SIZE_BYTES: Final = 36
"""Estimated size of a list's entry and of the integer that the entry refers to."""
_MAX_JOINED_REMOVALS: Final = 1024


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events since the last batch. sequence: number of the first event, counted from 0; at_s: wall clock.

    The next batch's sequence is this batch's sequence plus the number of its events. A larger one means that events
    were dropped between the two batches, and a reader starts anew.
    """

    sequence: int
    at_s: float
    events: list[KVCacheEvent]


@dataclass(slots=True)
class KVEventLog:
    """Keeps events until they are taken, the newest only if nobody takes them: bounded in number and in bytes.

    Invariant: _size_bytes is the sum of _size_of all kept events.
    """

    max_events: int = MAX_EVENTS
    max_size_bytes: int = MAX_SIZE_BYTES
    _events: deque[KVCacheEvent] = field(default_factory=deque)
    _size_bytes: int = 0
    _first_sequence: int = 0

    def add(self, event: KVCacheEvent) -> None:
        """Add an event. A removal is merged into the last event if that is a removal too, and not yet large."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, BlockRemoved)
            and isinstance(last, BlockRemoved)
            and len(last.block_hashes) < _MAX_JOINED_REMOVALS
        ):
            last.block_hashes.extend(event.block_hashes)
            self._size_bytes += _HASH_SIZE_BYTES * len(event.block_hashes)
        else:
            self._events.append(event)
            self._size_bytes += _size_of(event)
        while len(self._events) > self.max_events or self._size_bytes > self.max_size_bytes:
            self._drop(1)

    def take(self, now_s: float) -> KVEventBatch | None:
        """Return the events since the last call, and forget them; None if there are none. now_s: wall clock."""
        if not self._events:
            return None
        batch = KVEventBatch(self._first_sequence, now_s, list(self._events))
        self._drop(len(self._events))
        return batch

    def _drop(self, num_events: int) -> None:
        for _ in range(num_events):
            self._size_bytes -= _size_of(self._events.popleft())
        self._first_sequence += num_events


def _size_of(event: KVCacheEvent) -> int:
    """About how many bytes an event takes; a removal's grow while it is the last one."""
    match event:
        case BlockStored():
            num_bytes = _HASH_SIZE_BYTES * len(event.block_hashes) + _TOKEN_SIZE_BYTES * len(event.token_ids)
        case BlockRemoved():
            num_bytes = _HASH_SIZE_BYTES * len(event.block_hashes)
        case AllBlocksCleared():
            num_bytes = 0
    return _EVENT_SIZE_BYTES + num_bytes
