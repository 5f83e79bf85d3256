"""Follows what one engine reports of its prefix cache, and corrects the prefix index by it.

An engine first sends a snapshot of its cached blocks in parts, and then events with numbers in a row
(actors/sessions/block_messages.py). If a number or a part is missing, what follows is ignored until a new snapshot
comes, which is asked for every 5 s at most. Until the new snapshot is complete, the index keeps what it knew. A new
snapshot is due as well when the index keeps more blocks of a prefix than it did at the last one.

An engine can only spoil what the index knows of that engine: the engine can claim a quarter more blocks than it has,
and its number of blocks counts up to a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.sessions.block_messages import CachedBlocks, KVEvents
from cluster.routing.engine_connection import EngineKey
from cluster.routing.prefixes.prefix_index import MAX_ENGINE_BLOCKS, BlockKeys, PrefixIndex

ASK_INTERVAL_S: Final = 5.0
_EXTRA_BLOCKS: Final = 8192
"""How many more blocks an engine may claim: a block in a snapshot may be in an event as well."""


@dataclass(slots=True)
class BlockReportCounts:
    """Counts of what engines have reported to an ingress.

    num_events:    events that were taken in
    num_gaps:      how often reports were missing, or were more than an engine can have
    num_snapshots: complete snapshots
    """

    num_events: int = 0
    num_gaps: int = 0
    num_snapshots: int = 0


class EngineBlocks:
    """The reports of one incarnation of one engine, over one session."""

    def __init__(
        self,
        engine: EngineKey,
        index: PrefixIndex,
        block_size: int,
        counts: BlockReportCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Expect nothing before on_size().

        block_size: the index's; the reports of an engine with another one have other hashes, and are not asked for
        counts:     where events, gaps and snapshots are counted
        clock:      returns monotonic seconds
        """
        self._engine = engine
        self._index = index
        self._block_size = block_size
        self._counts = counts
        self._clock = clock
        self._max_claims = 0
        self._num_claims = 0
        self._is_wanting = False
        """Whether a snapshot is to be asked for."""
        self._is_asked = False
        """Whether a snapshot was asked for that has not begun."""
        self._asked_s: float | None = None
        self._next_sequence: int | None = None
        """The number of the next event; None while events are ignored."""
        self._next_begin: int | None = None
        """The first block id of the next part of the snapshot; None if no part is expected."""
        self._stride = 1
        """The index's stride when the newest snapshot began."""

    def on_size(self, num_blocks: int, block_size: int, *, has_states: bool = False) -> bool:
        """Note an engine's number of blocks and their size, and go on with what is due.

        has_states: whether the engine's model keeps recurrent states
        Returns whether the engine is to be asked for a snapshot now. Called with each of the engine's statistics.
        """
        if num_blocks and not self._max_claims:
            self._index.note_engine(self._engine, num_blocks, has_states=has_states)
            self._max_claims = min(num_blocks, MAX_ENGINE_BLOCKS) * 5 // 4 + _EXTRA_BLOCKS
            self._is_wanting = block_size == self._block_size
        self._index.tidy()
        if self._next_sequence is not None and self._index.stride < self._stride:
            self._start_over(is_gap=False)
        now_s = self._clock()
        if not self._is_wanting or (self._asked_s is not None and now_s < self._asked_s + ASK_INTERVAL_S):
            return False
        self._is_wanting, self._is_asked, self._asked_s = False, True, now_s
        return True

    def take(self, message: KVEvents | CachedBlocks) -> None:
        """Take in a message. Costs some microseconds for each of its blocks."""
        if isinstance(message, CachedBlocks):
            self._take_part(message)
        elif self._next_sequence is not None:
            self._take_events(message)

    def _take_part(self, part: CachedBlocks) -> None:
        if part.begin == 0 and self._is_asked:
            self._is_asked = False
            self._index.begin_snapshot(self._engine)
            self._stride = self._index.stride
            self._next_sequence, self._next_begin, self._num_claims = part.sequence, 0, 0
        if self._next_begin is None:
            return  # A snapshot that was given up.
        if part.begin != self._next_begin or part.sequence != self._next_sequence:
            self._start_over()
            return
        keys = _keys(part.keys)
        if self._claim(len(keys)):
            self._index.store(self._engine, keys, np.frombuffer(part.positions, "<u4"))
            self._next_begin = part.end
            if part.end == part.num_ids:
                self._index.end_snapshot(self._engine)
                self._next_begin = None
                self._counts.num_snapshots += 1

    def _take_events(self, message: KVEvents) -> None:
        if message.sequence != self._next_sequence:
            self._start_over()
            return
        if message.is_cleared:
            self._start_over(is_gap=False)
            return
        removed, stored = _keys(message.removed), _keys(message.stored)
        self._num_claims = max(0, self._num_claims - len(removed))
        self._index.discard(self._engine, removed)
        if self._claim(len(stored)):
            self._index.store(self._engine, stored, np.frombuffer(message.positions, "<u4"))
            self._next_sequence += message.num_events
            self._counts.num_events += message.num_events

    def _claim(self, num_blocks: int) -> bool:
        """Count blocks that the engine says it has. Returns whether it may have so many."""
        self._num_claims += num_blocks
        if self._num_claims > self._max_claims:
            self._start_over()
            return False
        return True

    def _start_over(self, *, is_gap: bool = True) -> None:
        self._next_sequence = self._next_begin = None
        self._is_wanting = True
        self._counts.num_gaps += is_gap


def _keys(keys: bytes) -> BlockKeys:
    return np.frombuffer(keys, "<u8")
