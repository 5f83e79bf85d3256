"""The worker side on real threads.

Tests of kv_transfer/connector/store_steps.py, kv_transfer/stores/base.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoredBlock, StoreMetadata
from kv_transfer.stores.base import KVStoreWorker
from kv_transfer.stores.host_tier import HostMemoryWorker
from kv_transfer.stores.store_copier import StoreCopier

A, B, C = (bytes([number]) * 16 for number in range(3))
SIZE = 2 * 3 * 2 * 4 * 5 * 4
TIMEOUT_S = 60.0


def make_cache(num_blocks: int = 8) -> Tensor:
    """Each block's floats are its number."""
    cache = torch.zeros(num_blocks, 2, 3, 2, 4, 5)
    return cache + torch.arange(num_blocks).view(-1, 1, 1, 1, 1, 1)


@contextmanager
def copier_of(cache: Tensor, *stores: KVStoreWorker) -> Iterator[tuple[StoreCopier, threading.Event]]:
    progress = threading.Event()
    copier = StoreCopier(cache, stores, progress.set)
    try:
        yield copier, progress
    finally:
        copier.close()
        for thread in copier._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def wait_for_load(copier: StoreCopier, progress: threading.Event) -> dict[str, LoadedBlocks]:
    assert progress.wait(TIMEOUT_S)
    progress.clear()
    return copier.take_loaded()


class StuckStore:
    """A store whose loads wait until the test lets them go."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.block = torch.full((SIZE,), 255, dtype=torch.uint8)

    def drop(self, block_hash: bytes) -> None:
        pass

    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        return None

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        raise AssertionError("it has no buffer")

    def load(self, block_hash: bytes) -> Tensor | None:
        self.is_asked.set()
        assert self.may_answer.wait(TIMEOUT_S)
        return self.block

    def close(self) -> None:
        pass


class BrokenStore(StuckStore):
    def buffer_for(self, block_hash: bytes) -> Tensor | None:
        return torch.empty(SIZE, dtype=torch.uint8)

    def save(self, block_hash: bytes, buffer: Tensor) -> None:
        raise OSError("no space left on device")

    def load(self, block_hash: bytes) -> Tensor | None:
        raise OSError("input/output error")


def test_blocks_go_out_and_come_back_bit_for_bit() -> None:
    cache = make_cache()
    with copier_of(cache, HostMemoryWorker(4, SIZE, is_pinned=False)) as (copier, progress):
        copier.start_step(StoreMetadata(saves=(StoredBlock(0, A, 3), StoredBlock(0, B, 5))))
        cache[3] = cache[5] = -1.0  # The step writes them as soon as it has begun.
        load = BlockLoad("r", (StoredBlock(0, A, 0), StoredBlock(0, B, 7)))
        copier.start_step(StoreMetadata(loads=(load,)))
        assert wait_for_load(copier, progress) == {"r": LoadedBlocks(2)}
        assert copier.take_loaded() == {}
        assert (cache[0] == 3).all()
        assert (cache[7] == 5).all()
        stats = copier.stats
        assert (stats.num_loaded_blocks, stats.num_loaded_bytes, stats.num_missing_blocks) == (2, 2 * SIZE, 0)


def test_a_load_ends_at_the_first_block_that_is_not_there() -> None:
    cache = make_cache()
    with copier_of(cache, HostMemoryWorker(4, SIZE, is_pinned=False)) as (copier, progress):
        copier.start_step(StoreMetadata(saves=(StoredBlock(0, A, 3), StoredBlock(0, C, 4))))
        load = BlockLoad("r", (StoredBlock(0, A, 0), StoredBlock(0, B, 1), StoredBlock(0, C, 2)))
        copier.start_step(StoreMetadata(loads=(load,)))
        [loaded] = wait_for_load(copier, progress).values()
        assert loaded.num_blocks == 1
        assert "does not have the block" in loaded.reason
        assert (cache[1] == 1).all()


def test_a_block_that_is_full_of_others_is_counted_as_not_saved() -> None:
    with copier_of(make_cache(), HostMemoryWorker(1, SIZE, is_pinned=False)) as (copier, _):
        copier.start_step(StoreMetadata(saves=(StoredBlock(0, A, 3), StoredBlock(0, B, 4))))
        assert copier.stats.num_unsaved_blocks == 1


def test_a_cancelled_load_writes_nothing_any_more() -> None:
    cache, store = make_cache(), StuckStore()
    with copier_of(cache, store) as (copier, progress):
        copier.start_step(StoreMetadata(loads=(BlockLoad("r", (StoredBlock(0, A, 2),)),)))
        assert store.is_asked.wait(TIMEOUT_S)
        copier.start_step(StoreMetadata(cancelled_loads=("r", "unknown")))
        assert wait_for_load(copier, progress) == {"r": LoadedBlocks(0, "cancelled")}
        store.may_answer.set()
    assert (cache[2] == 2).all(), "the store answered late, and its bytes went nowhere"


def test_one_store_that_is_stuck_does_not_stop_another() -> None:
    cache, stuck = make_cache(), StuckStore()
    with copier_of(cache, HostMemoryWorker(4, SIZE, is_pinned=False), stuck) as (copier, progress):
        copier.start_step(StoreMetadata(saves=(StoredBlock(0, A, 3),)))
        copier.start_step(StoreMetadata(loads=(BlockLoad("slow", (StoredBlock(1, B, 2),)),)))
        assert stuck.is_asked.wait(TIMEOUT_S)
        copier.start_step(StoreMetadata(loads=(BlockLoad("fast", (StoredBlock(0, A, 1),)),)))
        assert wait_for_load(copier, progress) == {"fast": LoadedBlocks(1)}
        stuck.may_answer.set()
        assert wait_for_load(copier, progress) == {"slow": LoadedBlocks(1)}


def test_a_store_that_raises_loses_the_block_and_nothing_else() -> None:
    cache = make_cache()
    with copier_of(cache, BrokenStore()) as (copier, progress):
        copier.start_step(StoreMetadata(saves=(StoredBlock(0, A, 3),)))
        copier.start_step(StoreMetadata(loads=(BlockLoad("r", (StoredBlock(0, A, 2),)),)))
        assert wait_for_load(copier, progress) == {"r": LoadedBlocks(0, "OSError: input/output error")}
        assert copier.stats.num_unsaved_blocks == 1


def test_loads_that_are_under_way_end_when_the_engine_does() -> None:
    store = StuckStore()
    copier = StoreCopier(make_cache(), [store], lambda: None)
    copier.start_step(StoreMetadata(loads=(BlockLoad("r", (StoredBlock(0, A, 2),)),)))
    assert store.is_asked.wait(TIMEOUT_S)
    store.may_answer.set()
    copier.close()
    assert set(copier.take_loaded()) == {"r"}
