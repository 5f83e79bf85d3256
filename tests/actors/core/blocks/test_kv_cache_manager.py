"""Tests of actors/core/blocks/kv_cache_manager.py and actors/core/blocks/fenced_blocks.py."""

from __future__ import annotations

import pytest

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.outputs.scheduler_stats import PrefixCacheStats
from actors.core.requests.request import Request
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, make_request


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    """Give the request slots for all its tokens and pretend that a step has filled them."""
    hit = kv.get_computed_blocks(request)
    num_hit_tokens = len(hit) * BLOCK_SIZE
    total = request.num_tokens if num_tokens is None else num_tokens
    assert kv.allocate_slots(request, total - num_hit_tokens, hit) is not None
    request.num_computed_tokens = total
    kv.cache_blocks(request, total)


def test_a_request_gets_as_many_blocks_as_its_tokens_begin() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    request = make_request("a", 9)
    new_blocks = kv.allocate_slots(request, 9)
    assert new_blocks is not None
    assert kv.get_block_ids("a") == [block.block_id for block in new_blocks] == [0, 1, 2]
    assert kv.usage == pytest.approx(3 / 8)


def test_a_decode_needs_a_block_only_at_a_block_boundary() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    request = make_request("a", 3)
    num_new = []
    for _ in range(6):
        new_blocks = kv.allocate_slots(request, 1)
        assert new_blocks is not None
        num_new.append(len(new_blocks))
        request.num_computed_tokens += 1
    assert num_new == [1, 0, 0, 0, 1, 0]


def test_blocks_stay_fenced_until_the_last_step_that_had_begun_is_over() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    request = make_request("a", 8)
    compute(kv, request)
    for step_index in (1, 2):
        kv.begin_step(step_index)
    kv.free(request)
    kv.begin_step(3)
    kv.end_step(1)
    assert (kv.num_fenced_blocks, kv.block_pool.num_free_blocks) == (2, 6)
    kv.end_step(2)
    assert (kv.num_fenced_blocks, kv.block_pool.num_free_blocks) == (0, 8)


def test_a_failed_allocation_touches_nothing() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    first = make_request("a", range(8))
    compute(kv, first)
    kv.free(first)
    holder = make_request("h", 8)
    assert kv.allocate_slots(holder, 8) is not None
    second = make_request("b", range(16))
    hit = kv.get_computed_blocks(second)
    assert len(hit) == 2
    # The hit's two blocks are themselves all that is free.
    assert kv.allocate_slots(second, 8, hit) is None
    assert [block.ref_cnt for block in hit] == [0, 0]
    assert kv.num_blocks_of("b") == 0
    assert len(kv.get_computed_blocks(second)) == 2
    kv.check_integrity()


def test_what_has_to_fit_and_what_has_to_stay_free_are_refused_without_being_taken() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    request = make_request("a", 20)
    assert kv.allocate_slots(request, 4, num_slots_that_must_fit=20) is None
    small = make_request("b", 8)
    assert kv.allocate_slots(small, 8, num_headroom_blocks=3) is None
    assert kv.allocate_slots(small, 8, num_slots_that_must_fit=8, num_headroom_blocks=2) is not None


def test_one_token_is_left_to_compute_even_if_all_are_cached() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    compute(kv, make_request("a", range(8)))
    assert len(kv.get_computed_blocks(make_request("b", range(8)))) == 1
    assert len(kv.get_computed_blocks(make_request("c", range(9)))) == 2


def test_a_consumer_may_hit_its_whole_prompt() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    compute(kv, make_request("a", range(8)))
    assert len(kv.get_computed_blocks(make_request("b", range(8), role=TransferRole.CONSUMER))) == 2
    assert len(kv.get_computed_blocks(make_request("c", range(8), role=TransferRole.PRODUCER))) == 1


def test_a_block_is_cached_only_when_its_last_token_is_final() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    request = make_request("a", range(8))
    assert kv.allocate_slots(request, 8) is not None
    other = make_request("b", range(9))
    assert kv.get_computed_blocks(other) == []
    kv.cache_blocks(request, 7)
    assert len(kv.get_computed_blocks(other)) == 1
    kv.cache_blocks(request, 8)
    assert len(kv.get_computed_blocks(other)) == 2


def test_requests_share_the_blocks_of_a_common_prefix() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    first, second = make_request("a", range(10)), make_request("b", [*range(8), 99, 98])
    compute(kv, first)
    compute(kv, second)
    assert kv.get_block_ids("a")[:2] == kv.get_block_ids("b")[:2]
    assert kv.get_block_ids("a")[2] != kv.get_block_ids("b")[2]
    kv.free(first)
    kv.check_integrity()
    assert kv.holders() == {"b"}


def test_salts_do_not_share() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    compute(kv, make_request("a", range(8), cache_salt="one"))
    assert kv.get_computed_blocks(make_request("b", range(9), cache_salt="two")) == []
    assert len(kv.get_computed_blocks(make_request("c", range(9), cache_salt="one"))) == 2


def test_without_caching_nothing_is_ever_hit() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE, enable_caching=False)
    request = make_request("a", range(8))
    compute(kv, request)
    assert kv.get_computed_blocks(make_request("b", range(9))) == []
    kv.count_lookup(request, 0)
    assert kv.prefix_cache_stats == PrefixCacheStats()


def test_the_cache_is_reset_only_when_nobody_holds_a_block() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE)
    request = make_request("a", range(8))
    compute(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert kv.prefix_cache_stats.reset
    assert kv.get_computed_blocks(make_request("b", range(9))) == []


def test_the_check_sees_a_block_that_no_request_holds() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    kv.block_pool.get_free_blocks(1)
    with pytest.raises(IntegrityError, match="block 0 has ref_cnt 1, 0 requests hold it"):
        kv.check_integrity()


def test_the_check_sees_a_block_that_too_many_hold_and_one_that_is_shared_without_a_hash() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    compute(kv, make_request("a", range(8)))
    kv.check_integrity()
    kv._blocks["b"] = kv._blocks["a"][:1]
    with pytest.raises(IntegrityError, match="block 0 has ref_cnt 1, 2 requests hold it"):
        kv.check_integrity()
    kv._blocks["a"][0].block_hash = None
    kv.block_pool.reset()
    with pytest.raises(IntegrityError, match="block 0 has no hash and is shared"):
        kv.check_integrity()
