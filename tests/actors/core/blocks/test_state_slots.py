"""Slots of recurrent states: got with a request's first blocks, given back with them, never shared and never cached.

tests/actors/core/test_scheduler_properties.py and test_prefill_decode_properties.py draw requests with slots too.
"""

from __future__ import annotations

import pytest

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.blocks.state_slots import StateSlots
from actors.core.requests.request import RequestStatus
from actors.errors import IntegrityError
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector
from tests.kv_transfer.reported import Reported


def test_a_request_gets_its_slot_with_its_first_blocks_only() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE, num_state_blocks=2)
    request = make_request("a", 5)
    new_blocks = kv.allocate_slots(request, 5)
    assert new_blocks is not None
    assert len(new_blocks) == 2
    slot = kv.states.get_block_ids("a")
    assert len(slot) == 2
    assert not set(slot) & set(kv.get_block_ids("a"))
    request.num_computed_tokens = 5
    assert kv.allocate_slots(request, 4) is not None
    assert kv.states.get_block_ids("a") == slot
    assert kv.get_group_ids("a") == (kv.get_block_ids("a"), slot)
    assert kv.get_handoff_ids(request) == kv.get_block_ids("a")[:2] + slot
    kv.check_integrity()


def test_a_request_is_not_admitted_without_room_for_its_slot() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, num_state_blocks=3)
    assert kv.allocate_slots(make_request("a", 5), 5) is None
    assert kv.block_pool.num_free_blocks == 4
    assert kv.allocate_slots(make_request("b", 4), 4) is not None
    assert kv.block_pool.num_free_blocks == 0


def test_a_slot_is_fenced_and_freed_with_the_blocks() -> None:
    kv = KVCacheManager(8, BLOCK_SIZE, num_state_blocks=2)
    request = make_request("a", 4)
    assert kv.allocate_slots(request, 4) is not None
    kv.begin_step(1)
    kv.free(request)
    assert (kv.num_fenced_blocks, kv.num_held_by("a")) == (3, 0)
    kv.end_step(1)
    assert kv.block_pool.num_free_blocks == 8
    kv.check_integrity()


def test_no_prefix_is_found_without_a_snapshot_of_the_state_after_it() -> None:
    kv = KVCacheManager(16, BLOCK_SIZE, num_state_blocks=1)
    first = make_request("a", range(8))
    assert kv.allocate_slots(first, 8) is not None
    kv.cache_blocks(first, 8)
    kv.offer_prompt_tail(first)
    again = make_request("b", range(8))
    assert kv.get_computed_blocks(again) == []
    assert kv.find_partial_block(again, []) is None


def test_what_does_not_fit_with_its_slot_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, num_state_blocks=2)
    driver = Driver(scheduler)
    scheduler.add_request(make_request("a", 9, max_tokens=1))
    driver.run()
    [end] = driver.outputs
    assert end.error is not None
    assert "3 blocks of 4 tokens" not in end.error
    assert "(2 of them for the recurrent state), the KV cache has 4" in end.error


def test_a_preempted_request_starts_over_from_no_state() -> None:
    driver = Driver(make_scheduler(num_blocks=9, num_state_blocks=2))
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, 7, max_tokens=12, ignore_eos=True))
    driver.run()  # The worker checks the state before each chunk and each token.
    assert driver.scheduler.make_stats().num_preemptions > 0
    for name in ("a", "b"):
        assert len(driver.tokens_of(name)) == 12


@pytest.mark.parametrize("outcome", [LoadOutcome.FAILED, LoadOutcome.CANCELLED])
def test_a_load_that_did_not_bring_the_state_is_computed_from_the_start(outcome: LoadOutcome) -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(num_blocks=16, num_state_blocks=2, connector=connector)
    driver = Driver(scheduler)
    consumer = make_request("a", 9, max_tokens=3, role=TransferRole.CONSUMER)
    scheduler.add_request(consumer)
    driver.step(Reported().output())
    [reservation] = connector.loading.values()
    assert list(reservation.block_ids) == scheduler.kv_cache_manager.get_handoff_ids(consumer)
    assert len(reservation.block_ids) == 3 + 2
    slot = scheduler.kv_cache_manager.states.get_block_ids("a")

    report = Reported()
    report.finished_recving["a"] = ReceivedKV(outcome, num_valid_tokens=9, reason="cut")
    driver.step(report.output())
    assert scheduler.kv_cache_manager.states.get_block_ids("a") == slot
    driver.step(Reported().output())
    driver.step(Reported().output())
    # The chunks end where a snapshot is due.
    assert [step.num_scheduled_tokens for step in driver.steps[-2:]] == [{"a": 8}, {"a": 1}]


def test_an_aborted_load_gives_its_slot_back_when_its_link_is_done() -> None:
    scheduler = make_scheduler(num_blocks=16, num_state_blocks=2, connector=FakeConnector())
    driver = Driver(scheduler)
    scheduler.add_request(make_request("a", 9, max_tokens=3, role=TransferRole.CONSUMER))
    driver.step(Reported().output())
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.step(Reported().output())
    assert scheduler.kv_cache_manager.num_held_by("a") == 3 + 2
    report = Reported()
    report.finished_recving["a"] = ReceivedKV(LoadOutcome.CANCELLED)
    driver.step(report.output())
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 16


def test_contradictions_are_found() -> None:
    slots = StateSlots(2)
    block = KVCacheBlock(0)
    slots.put("a", [block])
    with pytest.raises(IntegrityError, match="a slot of 1 blocks instead of 2"):
        slots.check_integrity({"a"})
    with pytest.raises(IntegrityError, match="either blocks or a slot"):
        slots.check_integrity({"a", "b"})
    slots.pop("a")
    slots.put("a", [block, KVCacheBlock(1)])
    slots.check_integrity({"a"})
    block.block_hash = b"h"
    with pytest.raises(IntegrityError, match="names a block of the slot"):
        slots.check_integrity({"a"})
