"""The host tier: which evicted blocks it keeps, and their bytes.

Tests of kv_transfer/stores/host_blocks.py.
"""

from __future__ import annotations

import pytest

from kv_transfer.layout import KVCacheLayout
from kv_transfer.stores.host_blocks import HostMemoryScheduler
from kv_transfer.stores.host_tier import HostMemoryWorker, num_host_slots

A, B, C, D = (bytes([number]) * 16 for number in range(4))


def test_the_least_recently_used_block_makes_room() -> None:
    tier = HostMemoryScheduler(2)
    assert all(tier.choose_evicted(block_hash) for block_hash in (A, B))
    assert not tier.choose_evicted(A), "it is here, and has just been used"
    assert tier.choose_evicted(C)
    assert tier.take_forgotten() == [B]
    assert tier.take_forgotten() == []
    assert [tier.find([block_hash]) for block_hash in (A, B, C)] == [1, 0, 1]


def test_a_prefix_is_found_up_to_its_first_gap() -> None:
    tier = HostMemoryScheduler(4)
    for block_hash in (A, B, D):
        tier.choose_evicted(block_hash)
    assert tier.find([A, B, C, D]) == 2
    assert tier.find([]) == 0


def test_what_is_being_loaded_is_not_given_up() -> None:
    tier = HostMemoryScheduler(2)
    tier.choose_evicted(A)
    tier.choose_evicted(B)
    tier.begin_load([A, B])
    assert not tier.choose_evicted(C), "everything is being loaded"
    tier.end_load([A, B], 2)
    assert tier.choose_evicted(C)
    assert tier.take_forgotten() == [B], "the end of a prefix is worth less than its beginning"


def test_a_block_that_two_load_stays_until_both_have_it() -> None:
    tier = HostMemoryScheduler(1)
    tier.choose_evicted(A)
    tier.begin_load([A])
    tier.begin_load([A])
    tier.end_load([A], 1)
    assert not tier.choose_evicted(B)
    tier.end_load([A], 0)
    assert tier.choose_evicted(B)


def test_clear_forgets_everything() -> None:
    tier = HostMemoryScheduler(2)
    tier.choose_evicted(A)
    tier.clear()
    assert tier.take_forgotten() == [A]
    assert tier.find([A]) == 0


def test_a_worker_keeps_each_block_in_a_slot_of_its_own() -> None:
    worker = HostMemoryWorker(2, 8, is_pinned=False)
    for value, block_hash in ((1, A), (2, B)):
        buffer = worker.buffer_for(block_hash)
        assert buffer is not None
        worker.save(block_hash, buffer.fill_(value))
    assert worker.buffer_for(C) is None, "no slot is free"
    found = worker.load(A)
    assert found is not None
    assert found.tolist() == [1] * 8
    worker.drop(A)
    worker.drop(D)
    assert worker.load(A) is None
    assert worker.buffer_for(C) is not None
    worker.close()


def test_the_tier_is_shared_by_the_ranks() -> None:
    layout = KVCacheLayout(10, 2, 3, 16, 8, "float32", 4, "model", tp_rank=1, tp_size=4)
    assert num_host_slots(layout, 1.0) == (1 << 30) // (layout.block_size_bytes * 4)
    with pytest.raises(ValueError, match="is too small for one block"):
        num_host_slots(layout, 1e-9)
