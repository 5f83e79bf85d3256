"""The worker side of an engine's stores, on one rank: copies blocks out of the KV cache and back into it.

Blocks are copied out in the engine thread, before the step in which they may be overwritten. On a GPU the copy is only
launched there, on the compute stream, so the device keeps the order. Blocks are copied in on the store's own thread,
one by one, each under the load's lock.

Invariant: a load is reported once, and is_over is set under its lock before that: from then on nothing writes the
load's blocks, also if it was cancelled.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoredBlock, StoreMetadata, StoreStats
from kv_transfer.device_kind import StreamEvent, StreamQueue, device_module, is_accelerator, mark_stream
from kv_transfer.stores.base import KVStoreWorker

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class _Load:
    """One load on this rank; each store brings some of its blocks.

    after:     the point on the device's compute stream from which on the blocks may be written; None on the CPU
    num_parts: stores that have not brought their part yet
    is_here:   for each block, whether it was copied in
    lock:      guards is_over and copies, num_parts and reason
    """

    load: BlockLoad
    after: StreamEvent | None
    num_parts: int
    started_s: float
    is_here: list[bool]
    reason: str = ""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Save:
    """A block whose bytes are in the store's buffer once the device has passed `after`."""

    block_hash: bytes
    buffer: Tensor
    after: StreamEvent | None


@dataclass(frozen=True, slots=True)
class _LoadPart:
    """The part of a load that one store brings. slots: indexes in the load's list of blocks"""

    load: _Load
    slots: tuple[int, ...]


class StoreCopier:
    """Copies blocks between the KV cache and stores, with one thread for each store.

    The engine thread calls start_step(), take_loaded() and close().
    """

    def __init__(self, kv_cache: Tensor, stores: Sequence[KVStoreWorker], on_progress: Callable[[], None]) -> None:
        """Start the threads.

        on_progress: called when take_loaded() has something, on a store's thread, or on the engine's after a cancel
        """
        self._rows = kv_cache.view(len(kv_cache), -1).view(torch.uint8)
        self._stores = list(stores)
        self._on_progress = on_progress
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedBlocks] = {}
        self._stats = StoreStats()
        self._queues = [queue.SimpleQueue[_Save | _LoadPart | None]() for _ in stores]
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"kv-store-{index}", daemon=True)
            for index in range(len(stores))
        ]
        for thread in self._threads:
            thread.start()

    # -- from the engine thread ----------------------------------------------------------------------------------

    def start_step(self, metadata: StoreMetadata) -> None:
        """Carry out what a step asks of stores, in its order. Called before anything of the step writes a block."""
        for index, block_hash in metadata.dropped:
            self._stores[index].drop(block_hash)
        if metadata.saves:
            self._copy_out(metadata.saves)
        for load in metadata.loads:
            self._begin(load)
        for request_id in metadata.cancelled_loads:
            if (cancelled := self._loads.get(request_id)) is not None:
                self._end(cancelled, "cancelled")

    def take_loaded(self) -> dict[str, LoadedBlocks]:
        """Remove and return the results of the loads that have ended since the last call, by request id."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        for request_id in loaded:
            del self._loads[request_id]
        return loaded

    @property
    def stats(self) -> StoreStats:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """End every load, wait a few seconds for the threads, and close the stores whose thread has ended."""
        for load in list(self._loads.values()):
            self._end(load, "the engine is shutting down")
        for jobs in self._queues:
            jobs.put(None)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for thread, store in zip(self._threads, self._stores, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if not thread.is_alive():
                store.close()

    def _copy_out(self, saves: Sequence[StoredBlock]) -> None:
        copied: list[tuple[int, _Save]] = []
        num_unsaved = 0
        for save in saves:
            buffer = self._stores[save.store].buffer_for(save.block_hash)
            if buffer is None:
                num_unsaved += 1
                continue
            buffer.copy_(self._rows[save.block_id], non_blocking=True)
            copied.append((save.store, _Save(save.block_hash, buffer, None)))
        after = mark_stream(self._rows.device)
        for index, job in copied:
            self._queues[index].put(replace(job, after=after))
        with self._lock:
            self._stats.num_unsaved_blocks += num_unsaved

    def _begin(self, load: BlockLoad) -> None:
        slots: dict[int, list[int]] = {}
        for place, block in enumerate(load.blocks):
            slots.setdefault(block.store, []).append(place)
        started = _Load(load, mark_stream(self._rows.device), len(slots), time.monotonic(), [False] * len(load.blocks))
        self._loads[load.request_id] = started
        for index, part in slots.items():
            self._queues[index].put(_LoadPart(started, tuple(part)))

    # -- on a store's thread -------------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        store, jobs = self._stores[index], self._queues[index]
        device = self._rows.device
        stream = device_module(device).Stream(device) if is_accelerator(device) else None
        while (job := jobs.get()) is not None:
            if isinstance(job, _Save):
                self._save(store, job)
            else:
                self._load(store, job, stream)

    def _save(self, store: KVStoreWorker, job: _Save) -> None:
        is_saved = False
        try:
            if job.after is not None:
                job.after.synchronize()
            store.save(job.block_hash, job.buffer)
            is_saved = True
        except Exception:
            # Third-party code may raise anything, and disks are full at times: the store just lacks the block.
            logger.exception("a KV store did not save a block")
        with self._lock:
            self._stats.num_saved_blocks += is_saved
            self._stats.num_unsaved_blocks += not is_saved

    def _load(self, store: KVStoreWorker, part: _LoadPart, stream: StreamQueue | None) -> None:
        load, reason = part.load, ""
        try:
            for place in part.slots:
                if load.is_over or not self._load_block(store, load, place, stream):
                    reason = "the store does not have the block any more"
                    break
        except Exception as error:
            logger.exception("a KV store did not load a block")
            reason = f"{type(error).__name__}: {error}"
        with load.lock:
            load.num_parts -= 1
            load.reason = load.reason or reason
            is_last = load.num_parts == 0
        if is_last:
            self._end(load, load.reason)

    def _load_block(self, store: KVStoreWorker, load: _Load, place: int, stream: StreamQueue | None) -> bool:
        block = load.load.blocks[place]
        source = store.load(block.block_hash)
        if source is None:
            return False
        with load.lock:
            if load.is_over:
                return True
            if stream is None:
                self._rows[block.block_id].copy_(source)
            else:
                assert load.after is not None, "an accelerator's load has an event"
                with device_module(self._rows.device).stream(stream):
                    stream.wait_event(load.after)
                    self._rows[block.block_id].copy_(source, non_blocking=True)
                stream.synchronize()
            load.is_here[place] = True
        return True

    def _end(self, load: _Load, reason: str) -> None:
        """Report a load, unless it was reported: on the thread of its last part, or on the engine thread."""
        with load.lock:
            if load.is_over:
                return
            load.is_over = True
        num_blocks = load.is_here.index(False) if False in load.is_here else len(load.is_here)
        seconds = time.monotonic() - load.started_s
        with self._lock:
            self._loaded[load.load.request_id] = LoadedBlocks(num_blocks, reason)
            self._stats.num_loaded_blocks += num_blocks
            self._stats.num_missing_blocks += len(load.is_here) - num_blocks
            self._stats.num_loaded_bytes += num_blocks * self._rows.shape[1]
            self._stats.load_s += seconds
        self._on_progress()
