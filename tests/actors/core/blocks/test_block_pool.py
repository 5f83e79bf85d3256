from __future__ import annotations

import pytest

from actors.core.blocks.block_pool import BlockPool, KVCacheBlock
from actors.errors import IntegrityError


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_blocks_without_a_hash_are_given_away_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.get_free_blocks(4)
    pool.cache_full_blocks(blocks[:2], [name(0), name(1)])
    pool.free(blocks)
    assert ids(pool.get_free_blocks(2)) == [2, 3]
    pool.check_integrity()


def test_a_prefix_is_lost_from_its_end_and_the_least_recently_used_first() -> None:
    pool = BlockPool(4)
    old, new = pool.get_free_blocks(2), pool.get_free_blocks(2)
    pool.cache_full_blocks(old, [name(0), name(1)])
    pool.cache_full_blocks(new, [name(2), name(3)])
    pool.free(old)
    pool.free(new)
    assert ids(pool.get_free_blocks(4)) == [1, 0, 3, 2]


def test_eviction_happens_only_when_a_block_is_given_away() -> None:
    pool = BlockPool(2)
    blocks = pool.get_free_blocks(2)
    pool.cache_full_blocks(blocks, [name(0), name(1)])
    pool.free(blocks)
    assert ids(pool.find_longest_prefix([name(0), name(1)], 9)) == [0, 1]
    pool.get_free_blocks(1)
    assert ids(pool.find_longest_prefix([name(0), name(1)], 9)) == [0]
    pool.check_integrity()


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_queue() -> None:
    pool = BlockPool(3)
    blocks = pool.get_free_blocks(3)
    pool.cache_full_blocks(blocks, [name(0), name(1), name(2)])
    pool.free(blocks)
    pool.touch([blocks[1]])
    assert pool.num_free_blocks == 2
    assert ids(pool.get_free_blocks(2)) == [2, 0]
    pool.check_integrity()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(1)
    blocks = pool.get_free_blocks(1)
    pool.cache_full_blocks(blocks, [name(0)])
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 0
    pool.free(blocks)
    assert pool.num_free_blocks == 1


def test_the_longest_prefix_ends_at_the_first_unknown_block_or_at_the_cap() -> None:
    pool = BlockPool(4)
    blocks = pool.get_free_blocks(3)
    pool.cache_full_blocks(blocks, [name(0), name(1), name(3)])
    assert ids(pool.find_longest_prefix([name(0), name(1), name(2), name(3)], 9)) == [0, 1]
    assert ids(pool.find_longest_prefix([name(0), name(1)], 1)) == [0]


def test_a_second_block_of_the_same_content_stays_without_a_name() -> None:
    pool = BlockPool(2)
    first, second = pool.get_free_blocks(2)
    pool.cache_full_blocks([first], [name(0)])
    pool.cache_full_blocks([second], [name(0)])
    assert second.block_hash is None
    assert pool.num_cached_blocks == 1
    pool.check_integrity()


def test_a_reset_forgets_the_names_of_held_and_of_free_blocks() -> None:
    pool = BlockPool(2)
    held, freed = pool.get_free_blocks(2)
    pool.cache_full_blocks([held, freed], [name(0), name(1)])
    pool.free([freed])
    pool.reset()
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 1)
    pool.free([held])
    pool.check_integrity()


def test_a_block_that_is_freed_twice_is_a_broken_invariant() -> None:
    pool = BlockPool(1)
    blocks = pool.get_free_blocks(1)
    pool.free(blocks)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(blocks)


def test_more_blocks_than_are_free_are_never_given_away() -> None:
    with pytest.raises(IntegrityError, match="3 blocks are asked for, and 2 are free"):
        BlockPool(2).get_free_blocks(3)


def test_the_check_sees_a_held_block_in_the_free_queue() -> None:
    pool = BlockPool(2)
    pool.blocks[0].ref_cnt = 1
    with pytest.raises(IntegrityError, match="block 0"):
        pool.check_integrity()


def test_the_check_sees_hashes_and_the_cache_disagree() -> None:
    pool = BlockPool(3)
    blocks = pool.get_free_blocks(2)
    pool.cache_full_blocks(blocks, [name(0), name(1)])
    blocks[0].block_hash = None
    with pytest.raises(IntegrityError, match="the cache names block 0, which has another hash"):
        pool.check_integrity()
    blocks[0].block_hash = name(0)
    pool.blocks[2].block_hash = name(2)
    with pytest.raises(IntegrityError, match=r"blocks \[0, 1, 2\] have a hash, but the cache maps 2 blocks"):
        pool.check_integrity()
    pool.blocks[2].block_hash = None
    pool.check_integrity()
