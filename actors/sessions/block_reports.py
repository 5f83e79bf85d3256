"""Reports what the prefix cache has, on the thread that steps the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.blocks.kv_events import KVEventBatch, KVEventLog
from actors.core.scheduler import Scheduler
from actors.sessions.block_messages import MAX_MESSAGE_BLOCKS, CachedBlocks, snapshot_message

_MAX_BATCH_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class BlockReports:
    """Delivers the events of the prefix cache, and snapshots of it."""

    log: KVEventLog
    cache: KVCacheManager
    deliver: Callable[[KVEventBatch], None]

    @classmethod
    def of(cls, scheduler: Scheduler, deliver: Callable[[KVEventBatch], None]) -> BlockReports | None:
        """Return the reports of a scheduler's cache; None if the scheduler records no events."""
        log = scheduler.kv_events
        return None if log is None else cls(log, scheduler.kv_cache_manager, deliver)

    @property
    def is_due(self) -> bool:
        """Whether there are so many events that they are delivered before the period is over."""
        return self.log.num_blocks >= _MAX_BATCH_BLOCKS

    def report(self) -> None:
        """Deliver the events so far."""
        if (batch := self.log.take()) is not None:
            self.deliver(batch)

    def send_part(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> int | None:
        """Deliver the events so far, and then a part of a snapshot.

        begin: id of the block that the part begins with
        Returns the begin of the next part; None after the last one.
        """
        self.report()
        num_ids = self.cache.block_pool.num_blocks
        end = min(begin + MAX_MESSAGE_BLOCKS, num_ids)
        deliver(snapshot_message(self.log.sequence, begin, num_ids, self.cache.reported_blocks(begin, end), end))
        return None if end == num_ids else end
