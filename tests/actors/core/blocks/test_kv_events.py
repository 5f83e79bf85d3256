"""A reader that applies the events knows what the prefix cache has."""

from __future__ import annotations

import random

from actors.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventLog
from actors.core.requests.block_hash import BlockHash
from tests.actors.core.builders import BLOCK_SIZE, make_request, make_scheduler
from tests.actors.core.fakes import Driver


def apply(known: dict[BlockHash, tuple[int, ...]], batch: KVEventBatch) -> None:
    for event in batch.events:
        if isinstance(event, BlockStored):
            for index, block_hash in enumerate(event.block_hashes):
                assert block_hash not in known
                known[block_hash] = tuple(event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del known[block_hash]
        else:
            known.clear()


def test_stored_blocks_are_told_with_their_tokens_and_their_parent() -> None:
    driver = Driver(make_scheduler(enable_kv_events=True))
    request = make_request("a", range(1, 11), max_tokens=4, ignore_eos=True)
    driver.scheduler.add_request(request)
    driver.run()
    batch = driver.scheduler.take_kv_events()
    assert batch is not None
    first, second = batch.events
    assert first == BlockStored(request.block_hashes[:2], None, list(range(1, 9)), BLOCK_SIZE)
    assert second == BlockStored(
        request.block_hashes[2:3], request.block_hashes[1], request.all_token_ids[8:12], BLOCK_SIZE
    )
    assert (batch.sequence, driver.scheduler.take_kv_events()) == (0, None)


def test_a_reset_clears_all() -> None:
    driver = Driver(make_scheduler(enable_kv_events=True))
    driver.scheduler.add_request(make_request("a", 8, max_tokens=1))
    driver.run()
    driver.scheduler.take_kv_events()
    assert driver.scheduler.reset_prefix_cache()
    batch = driver.scheduler.take_kv_events()
    assert batch is not None
    assert (batch.sequence, batch.events) == (1, [AllBlocksCleared()])


def test_a_readers_index_equals_the_cache_whatever_is_evicted() -> None:
    generator = random.Random(1)
    driver = Driver(make_scheduler(enable_kv_events=True, num_blocks=12))
    known: dict[BlockHash, tuple[int, ...]] = {}
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
    assert set(known) == {block.block_hash for block in pool.blocks if block.block_hash is not None}
    assert len(known) > 3


def test_nothing_is_told_unless_it_is_asked_for() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 8, max_tokens=1))
    driver.run()
    assert driver.scheduler.take_kv_events() is None


def stored(number: int, num_tokens: int = BLOCK_SIZE) -> BlockStored:
    return BlockStored([BlockHash(bytes([number]))], None, list(range(num_tokens)), BLOCK_SIZE)


def test_what_nobody_reads_is_bounded_in_number_and_a_gap_tells_a_reader_of_what_was_dropped() -> None:
    log = KVEventLog(max_events=3)
    log.add(stored(1))
    first = log.take(0.0)
    assert first is not None
    for number in range(2, 7):
        log.add(stored(number))
    second = log.take(0.0)
    assert second is not None
    assert second.events == [stored(4), stored(5), stored(6)]
    assert (first.sequence + len(first.events), second.sequence) == (1, 3)
    log.add(stored(7))
    third = log.take(0.0)
    assert third is not None
    assert third.sequence == second.sequence + len(second.events), "without a gap nothing was dropped"


def test_what_nobody_reads_is_bounded_in_bytes() -> None:
    log = KVEventLog(max_size_bytes=100_000)
    for number in range(20):
        log.add(stored(number, num_tokens=1000))
    batch = log.take(0.0)
    assert batch is not None
    assert batch.events == [stored(18, 1000), stored(19, 1000)]
    assert batch.sequence == 18


def test_removals_that_nobody_reads_are_bounded_although_they_are_joined() -> None:
    log = KVEventLog(max_size_bytes=200_000)
    for _ in range(10_000):
        log.add(BlockRemoved([BlockHash(b"x")]))
    batch = log.take(0.0)
    assert batch is not None
    num_removed = sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockRemoved))
    assert 1000 < num_removed < 200_000 / 64
    assert batch.sequence > 0
    assert log.take(0.0) is None


def test_an_engine_whose_events_nobody_takes_does_not_grow() -> None:
    driver = Driver(make_scheduler(enable_kv_events=True, num_blocks=4))
    log = driver.scheduler._kv_events
    assert log is not None
    log.max_events = 5
    for number in range(20):
        driver.scheduler.add_request(make_request(f"r{number}", 12, max_tokens=1))
        driver.run()
    batch = driver.scheduler.take_kv_events()
    assert batch is not None
    assert len(batch.events) <= 5
    assert batch.sequence > 5
