from __future__ import annotations

from kv_transfer.connector.store_steps import BlockLoad, StoredBlock
from kv_transfer.stores.host_blocks import HostMemoryScheduler
from kv_transfer.stores.store_set import StoreSet
from tests.kv_transfer.stores.memory_store import EverythingStore

A, B, C, D = (bytes([number]) * 16 for number in range(4))


def test_evicted_blocks_are_saved_before_their_place_is_written() -> None:
    stores = StoreSet([HostMemoryScheduler(2)])
    stores.on_block_evicted(A, 7)
    metadata = stores.take_metadata()
    assert metadata is not None
    assert metadata.saves == (StoredBlock(0, A, 7),)
    assert stores.take_metadata() is None


def test_a_block_given_up_before_it_was_saved_is_neither_saved_nor_dropped() -> None:
    stores = StoreSet([HostMemoryScheduler(1)])
    stores.on_block_evicted(A, 7)
    stores.on_block_evicted(B, 8)
    metadata = stores.take_metadata()
    assert metadata is not None
    assert metadata.saves == (StoredBlock(0, B, 8),)
    assert metadata.dropped == ()


def test_a_block_given_up_and_evicted_again_is_dropped_and_saved() -> None:
    stores = StoreSet([HostMemoryScheduler(1)])
    stores.on_block_evicted(A, 7)
    stores.take_metadata()
    stores.on_block_evicted(B, 8)
    stores.on_block_evicted(A, 9)
    metadata = stores.take_metadata()
    assert metadata is not None
    assert metadata.dropped == ((0, A),)
    assert metadata.saves == (StoredBlock(0, A, 9),)


def test_a_prefix_comes_from_several_stores_the_longest_run_first() -> None:
    near, far = HostMemoryScheduler(4), EverythingStore()
    stores = StoreSet([near, far])
    stores.on_block_evicted(A, 1)
    far.choose_cached([B, C])
    assert stores.reserve("r", [A, B, C, D]) == 3
    stores.start("r", [11, 12, 13])
    metadata = stores.take_metadata()
    assert metadata is not None
    blocks = (StoredBlock(0, A, 11), StoredBlock(1, B, 12), StoredBlock(1, C, 13))
    assert metadata.loads == (BlockLoad("r", blocks),)


def test_each_store_is_told_what_it_brought() -> None:
    class Store(EverythingStore):
        ends: tuple[list[bytes], int] = ([], 0)

        def end_load(self, block_hashes: object, num_loaded: int) -> None:
            self.ends = (block_hashes, num_loaded)  # type: ignore[assignment]

    near, far = Store(), Store()
    near.choose_cached([A])
    far.choose_cached([B, C])
    stores = StoreSet([near, far])
    stores.reserve("r", [A, B, C])
    stores.start("r", [1, 2, 3])
    stores.end("r", 2)
    assert near.ends == ([A], 1)
    assert far.ends == ([B, C], 1)
    stores.end("r", 3)
    stores.end("unknown", 1)
    assert stores.num_reserved == 0


def test_what_was_cleared_before_it_was_saved_is_not_saved() -> None:
    stores = StoreSet([HostMemoryScheduler(4)])
    stores.on_block_evicted(A, 1)
    stores.clear()
    assert stores.take_metadata() is None
    assert stores.reserve("r", [A]) == 0
