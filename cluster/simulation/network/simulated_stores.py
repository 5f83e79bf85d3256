"""The host tier of a simulated engine: how long loads from the host's memory take.

The scheduler's side is the product's: it decides which evicted blocks are kept and which are loaded. Here blocks are
copied in one after the other, as the store's thread does, with the bandwidth between the host and the device. Blocks
are copied out beside the steps, which takes no time of anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulation.event_queue import EventQueue
from kv_transfer.connector.reports import FinishedLoading
from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoreMetadata


@dataclass(slots=True, eq=False)
class _Load:
    """A load that is not over. begun_s: when its first block's copy began; None while others are copied"""

    load: BlockLoad
    begun_s: float | None = None


class SimulatedStores:
    """The worker's side of an engine's host tier. Invariant: the first load of _queue, and no other, has begun."""

    def __init__(self, events: EventQueue, block_s: float, report: Callable[[FinishedLoading], None]) -> None:
        """block_s: the seconds in which a block is copied in; report: takes the end of each load"""
        self._events = events
        self._block_s = block_s
        self._report = report
        self._queue: deque[_Load] = deque()

    def start_step(self, metadata: StoreMetadata) -> None:
        """Begin and cancel what a step asks for."""
        for load in metadata.loads:
            self._queue.append(_Load(load))
            self._begin_first()
        for request_id in metadata.cancelled_loads:
            if (found := next((one for one in self._queue if one.load.request_id == request_id), None)) is not None:
                self._end(found, "cancelled")

    def _begin_first(self) -> None:
        if self._queue and self._queue[0].begun_s is None:
            first = self._queue[0]
            first.begun_s = self._events.now_s
            end_s = self._events.now_s + len(first.load.blocks) * self._block_s
            self._events.at(end_s, self._copied, first)

    def _copied(self, load: _Load) -> None:
        if load in self._queue:
            self._end(load, "")

    def _end(self, load: _Load, reason: str) -> None:
        """Report a load with the blocks that have come, and begin the next one."""
        num_blocks = len(load.load.blocks)
        if reason:
            num_blocks = 0 if load.begun_s is None else int((self._events.now_s - load.begun_s) / self._block_s)
        self._queue.remove(load)
        self._report(FinishedLoading(load.load.request_id, LoadedBlocks(num_blocks, reason)))
        self._begin_first()
