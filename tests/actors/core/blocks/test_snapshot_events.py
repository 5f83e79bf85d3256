"""A reader that applies the events knows where a model with recurrent states has a state, and so how long hits are."""

from __future__ import annotations

from actors.core.blocks.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from actors.core.blocks.state_snapshots import end_of_snapshot
from actors.core.scheduler import Scheduler
from actors.sessions.block_messages import CachedBlocks
from actors.sessions.block_reports import BlockReports
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver


def events_of(scheduler: Scheduler) -> list[KVCacheEvent]:
    batch = scheduler.take_kv_events()
    return [] if batch is None else batch.events


def serve(driver: Driver, name: str, prompt: range) -> list[bytes]:
    request = make_request(name, prompt, max_tokens=1)
    driver.scheduler.add_request(request)
    driver.run()
    return request.block_hashes


def test_only_the_ends_of_snapshots_are_events() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    hashes = serve(driver, "a", range(11))
    assert events_of(driver.scheduler) == [BlockStored([hashes[1]], 1)]


def test_a_snapshot_without_one_of_its_blocks_is_removed_once() -> None:
    driver = Driver(make_scheduler(num_blocks=10, num_state_blocks=3))
    pool = driver.scheduler.kv_cache_manager.block_pool
    hashes = serve(driver, "a", range(9))
    events_of(driver.scheduler)
    held = pool.get_free_blocks(pool.num_blocks)
    assert events_of(driver.scheduler) == [BlockRemoved([hashes[1]])]
    pool.free(held)


def test_what_a_preempted_request_leaves_is_an_event() -> None:
    driver = Driver(make_scheduler(num_blocks=14, num_state_blocks=2))
    for name, prompt, num_tokens in (("a", range(9), 12), ("b", range(30, 39), 24)):
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=num_tokens, ignore_eos=True))
    driver.run_until_preempted()
    request = driver.scheduler.requests["b"]
    assert BlockStored([request.block_hashes[3]], 3) in events_of(driver.scheduler)
    driver.run()


def test_a_reset_clears_what_is_known() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    hashes = serve(driver, "a", range(11))
    assert driver.scheduler.reset_prefix_cache()
    assert serve(driver, "b", range(11)) == hashes
    assert events_of(driver.scheduler)[-1] == BlockStored([hashes[1]], 1)


def test_the_blocks_that_an_engine_reports_at_first_are_the_same() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    sent: list[KVEventBatch | CachedBlocks] = []
    reports = BlockReports.of(driver.scheduler, sent.append)
    assert reports is not None
    hashes = serve(driver, "a", range(11))
    assert reports.send_part(0, sent.append) is None
    [_, cached] = sent
    assert isinstance(cached, CachedBlocks)
    assert (cached.keys, cached.positions) == (hashes[1][:8], (1).to_bytes(4, "little"))


def test_the_names_of_blocks_of_tokens_are_no_names_of_snapshots() -> None:
    end, name = bytes(16), bytes(16) + bytes(4)
    assert [end_of_snapshot(end), end_of_snapshot(name), end_of_snapshot(name, place=0)] == [None, end, end]
    assert end_of_snapshot(name, place=1) is None
