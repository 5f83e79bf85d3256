"""Snapshots of recurrent states: where they are taken, whom they serve, and that no request lacks a block for them.

The fake worker checks the state before each chunk and each token (tests/actors/core/fakes.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.requests.request import RequestStatus
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens


def num_tokens_of_steps(driver: Driver, name: str) -> list[int]:
    """How many tokens of a request each step has computed."""
    return [step.num_scheduled_tokens[name] for step in driver.steps if name in step.num_scheduled_tokens]


def serve(driver: Driver, name: str, prompt: Iterable[int]) -> list[int]:
    driver.scheduler.add_request(make_request(name, list(prompt), max_tokens=1))
    driver.run()
    driver.scheduler.check_integrity()
    return num_tokens_of_steps(driver, name)


def test_a_prompt_is_cut_after_its_last_full_block_and_the_same_prompt_goes_on_from_there() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    assert serve(driver, "a", range(11)) == [8, 3]
    assert serve(driver, "same", range(11)) == [3]
    assert serve(driver, "longer", [*range(11), *range(30, 40)]) == [12, 1]
    assert serve(driver, "shorter", range(8)) == [4, 4]
    assert driver.scheduler.make_stats().prefix_cache_stats.hits == 8 + 8


def test_a_prompt_that_fills_its_blocks_leaves_the_last_one_to_compute() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    assert serve(driver, "a", range(12)) == [8, 4]
    assert serve(driver, "same", range(12)) == [4]
    assert serve(driver, "short", range(50, 54)) == [4]


def test_what_two_prompts_share_a_third_does_not_compute() -> None:
    driver = Driver(make_scheduler(num_blocks=40, num_state_blocks=2))
    shared = list(range(8))
    assert serve(driver, "first", [*shared, *range(20, 29)]) == [16, 1]
    assert serve(driver, "second", [*shared, *range(30, 39)]) == [8, 8, 1]
    assert serve(driver, "third", [*shared, *range(40, 49)]) == [8, 1]


def test_chunks_go_on_from_a_hit() -> None:
    driver = Driver(make_scheduler(num_blocks=40, num_state_blocks=2, max_num_batched_tokens=3))
    serve(driver, "a", range(11))
    assert serve(driver, "b", [*range(11), *range(30, 36)]) == [3, 3, 2, 1]


def test_a_step_copies_the_slot_and_a_later_one_the_snapshot() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    serve(driver, "a", range(11))
    assert [len(step.block_copies) for step in driver.steps if step.num_scheduled_tokens] == [0, 2]
    [*taken] = (copy.destination for copy in driver.steps[1].block_copies)
    serve(driver, "same", range(11))
    read = [copy.source for step in driver.steps[2:] for copy in step.block_copies]
    assert read == taken


def test_steps_hold_the_snapshots_that_they_write_and_read() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    scheduler, pool = driver.scheduler, driver.scheduler.kv_cache_manager.block_pool
    scheduler.add_request(make_request("a", range(11), max_tokens=1))
    driver.step()
    writes = scheduler.schedule()
    snapshot = [pool.blocks[copy.destination] for copy in writes.block_copies]
    assert [block.ref_cnt for block in snapshot] == [1, 1]
    scheduler.update_from_output(writes, driver.worker.execute(writes))
    assert [block.ref_cnt for block in snapshot] == [0, 0]
    scheduler.add_request(make_request("b", range(11), max_tokens=1))
    reads = scheduler.schedule()
    assert [block.ref_cnt for block in snapshot] == [1, 1]
    scheduler.update_from_output(reads, driver.worker.execute(reads))
    assert [block.ref_cnt for block in snapshot] == [0, 0]
    assert pool.num_free_blocks == 32


def test_no_snapshot_is_taken_twice() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, range(11), max_tokens=1))
    driver.run()
    assert driver.worker.num_copied == 2


@pytest.mark.parametrize(("is_chunked", "is_cached"), [(False, True), (True, False)])
def test_no_snapshot_is_taken_without_chunks_or_without_a_cache(is_chunked: bool, is_cached: bool) -> None:
    scheduler = make_scheduler(
        num_blocks=32, num_state_blocks=2, enable_chunked_prefill=is_chunked, enable_prefix_caching=is_cached
    )
    driver = Driver(scheduler)
    assert serve(driver, "a", range(11)) == [11]
    assert serve(driver, "b", range(11)) == [11]
    assert driver.worker.num_copied == 0


def test_a_model_without_states_has_no_snapshots() -> None:
    driver = Driver(make_scheduler(num_blocks=32))
    assert driver.scheduler.kv_cache_manager.snapshots is None
    assert serve(driver, "a", range(11)) == [11]


def test_a_request_with_too_few_blocks_for_a_copy_gets_the_snapshot_itself() -> None:
    driver = Driver(make_scheduler(num_blocks=10, num_state_blocks=3))
    kv = driver.scheduler.kv_cache_manager
    serve(driver, "a", range(9))
    assert driver.worker.num_copied == 3
    [*snapshot] = (copy.destination for copy in driver.steps[1].block_copies)
    driver.scheduler.add_request(make_request("other", range(30, 32), max_tokens=2, ignore_eos=True))
    driver.step()
    # Of the 6 blocks that are free, 2 are of the hit, 1 is for the last token, and 3 are for the slot.
    driver.scheduler.add_request(make_request("b", range(9), max_tokens=2, ignore_eos=True))
    driver.step()
    assert kv.states.get_block_ids("b") == snapshot
    driver.scheduler.check_integrity()
    driver.run()
    assert driver.worker.num_copied == 3
    assert kv.get_computed_blocks(make_request("c", range(9))) == []


def test_a_snapshot_that_a_step_copies_is_not_given_away() -> None:
    driver = Driver(make_scheduler(num_blocks=13, num_state_blocks=3))
    serve(driver, "a", range(9))
    snapshot = {copy.destination for copy in driver.steps[1].block_copies}
    for name in ("b", "c"):
        driver.scheduler.add_request(make_request(name, range(9), max_tokens=2, ignore_eos=True))
    driver.step()
    slots = [driver.scheduler.kv_cache_manager.states.get_block_ids(name) for name in ("b", "c")]
    assert len(snapshot.union(*slots)) == 9
    driver.scheduler.check_integrity()
    driver.run()


def test_a_snapshot_with_an_evicted_block_serves_nobody() -> None:
    driver = Driver(make_scheduler(num_blocks=12, num_state_blocks=2))
    kv = driver.scheduler.kv_cache_manager
    serve(driver, "a", range(9))
    assert kv.snapshots is not None
    hit = kv.get_computed_blocks(make_request("b", range(9)))
    last_hash = hit[-1].block_hash
    assert last_hash is not None
    kv.block_pool.forget(kv.snapshots.find(last_hash)[1:])
    assert kv.get_computed_blocks(make_request("b", range(9))) == []
    with pytest.raises(IntegrityError, match="ends where no snapshot was taken"):
        kv.snapshots.hold(hit)
    # The same prompt takes a whole new one.
    assert serve(driver, "b", range(9)) == [8, 1]
    written = [copy.destination for copy in driver.steps[-2].block_copies or driver.steps[-1].block_copies]
    assert [block.block_id for block in kv.snapshots.find(last_hash)] == written
    assert serve(driver, "c", range(9)) == [1]


def test_no_snapshot_takes_the_blocks_that_running_requests_grow_into() -> None:
    driver = Driver(make_scheduler(num_blocks=8, num_state_blocks=2))
    # 3 blocks of tokens and 2 of the slot leave 3: a snapshot of 2, and one for the running request.
    assert serve(driver, "a", range(9)) == [8, 1]
    assert driver.worker.num_copied == 2
    driver = Driver(make_scheduler(num_blocks=7, num_state_blocks=2))
    assert serve(driver, "a", range(9)) == [8, 1]
    assert driver.worker.num_copied == 0


def decode(driver: Driver, **requests: tuple[range, int]) -> None:
    """Serve requests together: each a prompt, and the number of its output tokens."""
    for name, (prompt, num_tokens) in requests.items():
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=num_tokens, ignore_eos=True))
    driver.run()
    for name, (prompt, num_tokens) in requests.items():
        assert driver.tokens_of(name) == reference_tokens(prompt, num_tokens, eos=-1)


def preemptions_of(driver: Driver, name: str) -> list[int]:
    """After how many tokens each preemption of a request has left the state."""
    told = [output.preemption for output in driver.outputs if output.request_id == name]
    return [preemption.num_computed_tokens for preemption in told if preemption is not None]


@pytest.mark.parametrize(("num_lookahead_tokens", "num_left_tokens"), [(0, 16), (5, 12)])
def test_a_request_stops_at_the_end_of_a_block_and_goes_on_from_its_state(
    num_lookahead_tokens: int, num_left_tokens: int
) -> None:
    driver = Driver(make_scheduler(num_blocks=14, num_state_blocks=2, num_lookahead_tokens=num_lookahead_tokens))
    decode(driver, a=(range(9), 12), b=(range(30, 39), 24))
    # While fewer than 2 blocks are free for each of the two, b stops; a takes one of those, and ends.
    assert preemptions_of(driver, "b") == [num_left_tokens]
    # No token is computed again.
    assert sum(num_tokens_of_steps(driver, "b")) == 9 + 24 - 1
    assert driver.scheduler.make_stats().num_preemptions == 1


def test_a_request_whose_state_is_evicted_while_it_waits_starts_over() -> None:
    driver = Driver(make_scheduler(num_blocks=16, num_state_blocks=2))
    decode(driver, a=(range(9), 24), b=(range(30, 39), 24))
    assert preemptions_of(driver, "b") == [20]
    # Of the prompt's own snapshot nothing is left either: it is taken again.
    assert [num_tokens for num_tokens in num_tokens_of_steps(driver, "b") if num_tokens > 1] == [8, 8, 13]


def test_nobody_stops_who_runs_alone_or_while_blocks_are_plenty() -> None:
    alone = Driver(make_scheduler(num_blocks=11, num_state_blocks=2))
    decode(alone, a=(range(9), 24))
    beside = Driver(make_scheduler(num_blocks=25, num_state_blocks=2))
    decode(beside, a=(range(9), 24), b=(range(30, 39), 24))
    assert [driver.scheduler.make_stats().num_preemptions for driver in (alone, beside)] == [0, 0]


def test_the_least_urgent_request_stops() -> None:
    driver = Driver(make_scheduler(num_blocks=14, num_state_blocks=2, policy="priority"))
    for name, prompt, priority, num_tokens in (("low", range(30, 39), 5, 24), ("high", range(9), 0, 12)):
        request = make_request(name, prompt, max_tokens=num_tokens, priority=priority, ignore_eos=True)
        driver.scheduler.add_request(request)
    driver.run()
    assert (preemptions_of(driver, "low"), preemptions_of(driver, "high")) == ([16], [])


def test_a_request_that_is_preempted_within_a_block_leaves_no_state() -> None:
    scheduler = make_scheduler(num_blocks=32, num_state_blocks=2)
    driver, kv = Driver(scheduler), scheduler.kv_cache_manager
    assert kv.snapshots is not None
    request = make_request("a", range(4), max_tokens=9, ignore_eos=True)
    scheduler.add_request(request)
    for _ in range(4):
        driver.step()
    assert (request.num_computed_tokens, kv.leave_prefix(request)) == (7, 0)
    # The step under way fills the block, and still writes the state.
    under_way = scheduler.schedule()
    assert (request.num_computed_tokens, kv.leave_prefix(request)) == (8, 0)
    assert all(block.block_hash is None for block in kv.states.get_blocks("a"))
    scheduler.update_from_output(under_way, driver.worker.execute(under_way))
    driver.run()


def test_a_preemption_without_a_prefix_cache_leaves_nothing() -> None:
    scheduler = make_scheduler(num_blocks=14, num_state_blocks=2, enable_prefix_caching=False)
    driver = Driver(scheduler)
    decode(driver, a=(range(9), 24), b=(range(30, 39), 24))
    assert preemptions_of(driver, "b") == [0]


def test_a_consumer_has_no_hit_and_a_producer_has_one() -> None:
    scheduler = make_scheduler(num_blocks=40, num_state_blocks=2, connector=FakeConnector())
    driver = Driver(scheduler)
    serve(driver, "a", range(11))
    kv = scheduler.kv_cache_manager
    assert kv.get_computed_blocks(make_request("c", range(11), role=TransferRole.CONSUMER)) == []
    assert len(kv.get_computed_blocks(make_request("p", range(11), role=TransferRole.PRODUCER))) == 2


def test_tails_are_not_copied_where_requests_have_slots() -> None:
    kv = KVCacheManager(16, BLOCK_SIZE, num_state_blocks=1)
    first = make_request("a", range(6))
    assert kv.allocate_slots(first, 6) is not None
    kv.cache_blocks(first, 6)
    kv.offer_prompt_tail(first)
    assert kv.find_partial_block(make_request("b", range(6)), []) is None


def test_a_request_that_ends_before_its_next_chunk_leaves_nothing_behind() -> None:
    driver = Driver(make_scheduler(num_blocks=32, num_state_blocks=2))
    request = make_request("a", range(11), max_tokens=1)
    driver.scheduler.add_request(request)
    driver.step()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.run()
    assert driver.worker.num_copied == 0
    assert driver.scheduler.kv_cache_manager.snapshots is not None
    assert driver.scheduler.kv_cache_manager.snapshots.cut_chunk(request, 0, 11) == 11
    assert driver.scheduler.kv_cache_manager.block_pool.num_free_blocks == 32
