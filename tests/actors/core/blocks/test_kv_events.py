"""A reader that applies the events knows what the prefix cache has."""

from __future__ import annotations

import random

import pytest

from actors.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventLog
from actors.core.requests.block_hash import BlockHash
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver


def apply(known: dict[BlockHash, int], batch: KVEventBatch) -> None:
    for event in batch.events:
        if isinstance(event, BlockStored):
            for position, block_hash in enumerate(event.block_hashes, event.first_block):
                assert block_hash not in known
                known[block_hash] = position
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del known[block_hash]
        else:
            known.clear()


def test_stored_blocks_are_reported_with_their_position() -> None:
    driver = Driver(make_scheduler())
    request = make_request("a", range(1, 11), max_tokens=4, ignore_eos=True)
    driver.scheduler.add_request(request)
    driver.run()
    batch = driver.scheduler.take_kv_events()
    assert batch is not None
    assert batch.events == [BlockStored(request.block_hashes[:2], 0), BlockStored(request.block_hashes[2:3], 2)]
    assert (batch.sequence, driver.scheduler.take_kv_events()) == (0, None)


def test_a_reset_clears_all() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 8, max_tokens=1))
    driver.run()
    driver.scheduler.take_kv_events()
    assert driver.scheduler.reset_prefix_cache()
    batch = driver.scheduler.take_kv_events()
    assert batch is not None
    assert (batch.sequence, batch.events) == (1, [AllBlocksCleared()])


def test_a_readers_index_equals_the_cache_whatever_is_evicted() -> None:
    generator = random.Random(1)
    driver = Driver(make_scheduler(num_blocks=12))
    known: dict[BlockHash, int] = {}
    for number in range(60):
        shared = generator.choice([0, 4, 8])
        prompt = [*range(1, shared + 1), *(generator.randrange(100, 104) for _ in range(generator.randrange(1, 12)))]
        driver.scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=generator.randrange(1, 9)))
        for _ in range(generator.randrange(4)):
            driver.step()
        if (batch := driver.scheduler.take_kv_events()) is not None:
            apply(known, batch)
    driver.run()
    if (batch := driver.scheduler.take_kv_events()) is not None:
        apply(known, batch)
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert known == {block.block_hash: block.position for block in pool.blocks if block.block_hash is not None}
    assert len(known) > 3


@pytest.mark.parametrize(("has_events", "has_cache"), [(False, True), (True, False)])
def test_nothing_is_reported_if_that_is_turned_off_or_nothing_is_cached(has_events: bool, has_cache: bool) -> None:
    driver = Driver(make_scheduler(enable_kv_events=has_events, enable_prefix_caching=has_cache))
    driver.scheduler.add_request(make_request("a", 8, max_tokens=1))
    driver.run()
    assert driver.scheduler.take_kv_events() is None


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def test_of_what_nobody_reads_the_newest_is_kept_and_a_gap_tells_a_reader_of_what_was_dropped() -> None:
    log = KVEventLog(max_blocks=6)
    log.store([name(1)], 0)
    first = log.take()
    assert first is not None
    for number in range(2, 7):
        log.store([name(number)], number)
    second = log.take()
    assert second is not None
    assert second.events == [BlockStored([name(number)], number) for number in (4, 5, 6)]
    assert (first.sequence + len(first.events), second.sequence) == (1, 3)
    log.clear()
    third = log.take()
    assert third is not None
    assert third.sequence == second.sequence + len(second.events), "without a gap nothing was dropped"


def test_removals_are_joined_and_bounded() -> None:
    log = KVEventLog(max_blocks=5_000)
    for _ in range(10_000):
        log.remove(name(1))
    assert log.num_blocks <= 5_000
    batch = log.take()
    assert batch is not None
    sizes = [len(event.block_hashes) for event in batch.events]
    assert (batch.sequence, sizes) == (5, [1024, 1024, 1024, 1024, 784])
    assert (log.num_blocks, log.take()) == (0, None)


def test_a_batch_that_was_taken_does_not_change() -> None:
    log = KVEventLog()
    log.remove(name(1))
    first = log.take()
    log.remove(name(2))
    second = log.take()
    assert first == KVEventBatch(0, [BlockRemoved([name(1)])])
    assert second == KVEventBatch(1, [BlockRemoved([name(2)])])


def test_a_large_store_is_cut_into_events() -> None:
    log = KVEventLog()
    log.store([name(number % 200) for number in range(2500)], 10)
    batch = log.take()
    assert batch is not None
    assert [
        (event.first_block, len(event.block_hashes)) for event in batch.events if isinstance(event, BlockStored)
    ] == [
        (10, 1024),
        (1034, 1024),
        (2058, 452),
    ]


def test_the_blocks_of_the_cache_are_listed_with_their_positions() -> None:
    driver = Driver(make_scheduler())
    request = make_request("a", range(1, 11), max_tokens=1, ignore_eos=True)
    driver.scheduler.add_request(request)
    driver.run()
    pool = driver.scheduler.kv_cache_manager.block_pool
    listed = [*pool.cached_blocks(0, 1), *pool.cached_blocks(1, pool.num_blocks)]
    assert {block.block_hash: block.position for block in listed} == dict(
        zip(request.block_hashes[:2], (0, 1), strict=True)
    )


def test_an_engine_whose_events_nobody_takes_does_not_grow() -> None:
    driver = Driver(make_scheduler(num_blocks=4))
    log = driver.scheduler.kv_events
    assert log is not None
    log.max_blocks = 10
    for number in range(20):
        driver.scheduler.add_request(make_request(f"r{number}", 12, max_tokens=1))
        driver.run()
    assert log.num_blocks <= 10
    assert log.sequence > 5
