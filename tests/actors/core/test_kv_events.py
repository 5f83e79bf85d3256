"""A reader that applies the events knows what the prefix cache has."""

from __future__ import annotations

import random

from actors.core.block_hash import BlockHash
from actors.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
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
