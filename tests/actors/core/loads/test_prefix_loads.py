"""Evicted blocks come back from a store, and whatever the store does, answers are right and no block is lost.

Tests of kv_transfer/connector/fetches.py, kv_transfer/prefix/prefix_sources.py, actors/core/blocks/transfer_pins.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import RequestStatus
from actors.core.scheduler import Scheduler
from kv_transfer.connector.fetches import PrefixFetch, WantedFetch
from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks
from kv_transfer.params import EngineAddress, TransferRole
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.stores.host_blocks import HostMemoryScheduler
from kv_transfer.stores.store_set import StoreSet
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.kv_transfer.reported import Reported
from tests.kv_transfer.stores.memory_store import EverythingStore

GARBAGE = -99


@dataclass
class StoringDriver:
    """A driver whose worker side has stores. Loads end when the test says so."""

    scheduler: Scheduler
    connector: FakeConnector
    clock: Clock
    reservations: StoreSet
    driver: Driver = field(init=False)
    stored: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    loads: dict[str, BlockLoad] = field(default_factory=dict)
    news: Reported = field(default_factory=Reported)
    num_loads: int = 0

    def __post_init__(self) -> None:
        self.driver = Driver(self.scheduler)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output.kv_connector_metadata is not None
        stores, slots = output.kv_connector_metadata.stores, self.driver.worker.slots
        for dropped in stores.dropped if stores else ():
            del self.stored[dropped]
        for save in stores.saves if stores else ():
            first = save.block_id * BLOCK_SIZE
            self.stored[save.store, save.block_hash] = slots[first : first + BLOCK_SIZE]
        for load in stores.loads if stores else ():
            self.num_loads += 1
            self.loads[load.request_id] = load
            self._fill(load, 0)
        for request_id in stores.cancelled_loads if stores else ():
            if request_id in self.loads:
                self.end_load(request_id, 0)
        model_output = self.driver.worker.execute(output)
        model_output.kv_connector_output, self.news = self.news.output(), Reported()
        for client in self.scheduler.update_from_output(output, model_output).values():
            self.driver.outputs += client.outputs
        self.scheduler.check_integrity()
        return output

    def end_load(self, request_id: str, num_blocks: int) -> None:
        load = self.loads.pop(request_id)
        self._fill(load, num_blocks)
        self.news.finished_loading[request_id] = LoadedBlocks(num_blocks)

    def _fill(self, load: BlockLoad, num_blocks: int) -> None:
        for index, block in enumerate(load.blocks):
            first = block.block_id * BLOCK_SIZE
            kv = self.stored[block.store, block.block_hash] if index < num_blocks else [GARBAGE] * BLOCK_SIZE
            self.driver.worker.slots[first : first + BLOCK_SIZE] = kv

    def run(self, max_steps: int = 300) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.loads:
                assert not self.reservations.num_reserved, "a reservation was not ended"
                return
            for request_id in list(self.loads):
                self.end_load(request_id, len(self.loads[request_id].blocks))
            self.step()
            self.news.finished_sending |= set(self.scheduler.remote.held)
        raise AssertionError(f"stuck: {self.scheduler.requests}")

    def serve(self, request_id: str, prompt: Iterable[int], **options: Any) -> list[int]:
        """Run one request alone; its tokens."""
        self.scheduler.add_request(make_request(request_id, list(prompt), **options))
        self.run()
        return self.driver.tokens_of(request_id)

    def is_whole(self) -> bool:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_free_blocks == pool.num_blocks


def make_driver(*, num_host_blocks: int = 50, stores_all: bool = False, **options: Any) -> StoringDriver:
    clock, connector = Clock(), FakeConnector()
    stores = [EverythingStore()] if stores_all else [HostMemoryScheduler(num_host_blocks)]
    sources = StoreSet(stores)
    scheduler = make_scheduler(connector=connector, prefix_sources=PrefixSources(sources, None), clock=clock, **options)
    return StoringDriver(scheduler, connector, clock, sources)


FIRST = list(range(1, 18))
OTHER = list(range(101, 130))


def evict_first(driver: StoringDriver) -> None:
    """Serve FIRST, then OTHER, which needs all blocks."""
    driver.serve("first", FIRST)
    driver.serve("other", OTHER)


def test_an_evicted_prefix_comes_back_and_only_the_rest_is_computed() -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    driver.scheduler.add_request(make_request("again", FIRST))
    driver.step()
    assert driver.scheduler.requests["again"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    driver.end_load("again", len(driver.loads["again"].blocks))
    driver.step()
    output = driver.step()
    assert output.num_scheduled_tokens == {"again": len(FIRST) % BLOCK_SIZE or BLOCK_SIZE}
    driver.run()
    assert driver.driver.tokens_of("again") == reference_tokens(FIRST, 4)
    stats = driver.scheduler.make_stats().prefix_cache_stats
    assert (stats.loaded > 0, stats.fetched) == (True, 0)
    assert stats.hits + stats.loaded == len(FIRST) // BLOCK_SIZE * BLOCK_SIZE
    assert driver.is_whole()


def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute() -> None:
    driver = make_driver(num_blocks=9)
    prompt = FIRST[:16]
    driver.serve("first", prompt)
    driver.serve("other", OTHER)
    assert driver.serve("again", prompt) == reference_tokens(prompt, 4)
    assert driver.num_loads == 1


def test_a_load_that_brings_less_is_computed_and_not_tried_again() -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    driver.scheduler.add_request(make_request("again", FIRST))
    driver.step()
    driver.end_load("again", 1)
    driver.run()
    assert driver.num_loads == 1
    assert driver.driver.tokens_of("again") == reference_tokens(FIRST, 4)


def test_a_load_past_its_deadline_is_cancelled_and_computed() -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    driver.scheduler.add_request(make_request("again", FIRST))
    driver.step()
    deadline_s = driver.scheduler.next_deadline()
    assert deadline_s is not None, "a load has a deadline"
    driver.clock.now_s = deadline_s
    for _ in range(4):
        driver.step()
    assert not driver.loads
    driver.run()
    assert driver.driver.tokens_of("again") == reference_tokens(FIRST, 4)


@pytest.mark.parametrize("role", [None, TransferRole.PRODUCER])
def test_blocks_of_an_aborted_load_are_held_until_nothing_writes_them(role: TransferRole | None) -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    driver.scheduler.add_request(make_request("again", FIRST, role=role))
    driver.news.ready_to_prefill.add("again")
    for _ in range(3):
        driver.step()
    assert "again" in driver.loads
    driver.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    assert not driver.is_whole()
    assert "again" in driver.scheduler.remote.held
    driver.run()
    assert driver.is_whole()


def test_a_producer_loads_its_prefix_once_its_consumer_is_ready() -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    driver.scheduler.add_request(make_request("again", FIRST, role=TransferRole.PRODUCER))
    driver.step()
    assert not driver.loads, "it holds nothing before READY"
    driver.news.ready_to_prefill.add("again")
    driver.run()
    assert driver.num_loads == 1
    assert driver.driver.tokens_of("again") == reference_tokens(FIRST, 1)
    assert driver.is_whole()


def test_a_preempted_request_gets_its_prefix_back() -> None:
    driver = make_driver(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=16, policy="priority")
    driver.scheduler.add_request(make_request("low", list(range(1, 14)), max_tokens=12, priority=1))
    for _ in range(3):
        driver.step()
    driver.scheduler.add_request(make_request("high", list(range(201, 216)), max_tokens=14, priority=0))
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions > 0
    assert driver.num_loads > 0
    assert driver.driver.tokens_of("low") == reference_tokens(list(range(1, 14)), 12)


def test_a_reset_prefix_cache_forgets_what_is_stored() -> None:
    driver = make_driver(num_blocks=9)
    evict_first(driver)
    assert driver.scheduler.reset_prefix_cache()
    assert driver.serve("again", FIRST) == reference_tokens(FIRST, 4)
    assert driver.num_loads == 0
    assert not driver.stored


def test_a_store_that_writes_through_has_what_no_step_has_evicted() -> None:
    driver = make_driver(num_blocks=64, stores_all=True)
    driver.serve("first", FIRST)
    driver.step()
    assert len(driver.stored) == (len(FIRST) + 3) // BLOCK_SIZE


def make_source(**options: Any) -> StoringDriver:
    clock, connector = Clock(), FakeConnector()
    sources = PrefixSources(None, PrefixFetches("me", BLOCK_SIZE, max_fetches=0))
    scheduler = make_scheduler(connector=connector, prefix_sources=sources, clock=clock, **options)
    return StoringDriver(scheduler, connector, clock, StoreSet([]))


def test_what_is_asked_for_twice_is_pinned_once_and_released() -> None:
    driver = make_source(num_blocks=40)
    request = make_request("first", FIRST)
    driver.scheduler.add_request(request)
    driver.run()
    fetch = PrefixFetch("fetch-1", tuple(request.block_hashes[:3]))
    want = WantedFetch(0, EngineAddress("peer", 1, ""), fetch)
    for _ in range(2):
        driver.news.wants.append(want)
        driver.step()
    assert not driver.is_whole()
    assert driver.scheduler.has_requests(), "blocks that another engine reads are waited for"
    assert not driver.scheduler.reset_prefix_cache()
    driver.news.finished_sending.add(want.answer_key)
    driver.step()
    assert driver.is_whole()
    assert not driver.scheduler.has_requests()


@pytest.mark.parametrize(("num_running", "num_read"), [(0, 6), (1, 5), (2, 4)])
def test_nobody_is_preempted_for_blocks_that_others_read(num_running: int, num_read: int) -> None:
    driver = make_source(num_blocks=24, max_model_len=128, max_num_batched_tokens=96)
    request = make_request("first", 24, max_tokens=1)
    driver.scheduler.add_request(request)
    driver.run()
    # The cached blocks are all that is free, and those that run want some of them soon.
    for index in range(num_running):
        length = 18 * BLOCK_SIZE // num_running - 1
        driver.scheduler.add_request(make_request(f"r{index}", length, max_tokens=9, ignore_eos=True))
    driver.step()
    want = WantedFetch(0, EngineAddress("peer", 1, ""), PrefixFetch("fetch-1", tuple(request.block_hashes)))
    driver.news.wants.append(want)
    driver.step()
    kv = driver.scheduler.kv_cache_manager
    assert kv.pins.num_pinned_by(want.answer_key) == num_read
    driver.step()
    assert driver.scheduler.make_stats().num_preemptions == 0
    driver.news.finished_sending.add(want.answer_key)
    driver.run()
    assert driver.is_whole()


TURNS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 26),
        st.sampled_from([None, None, TransferRole.PRODUCER]),
        st.integers(0, 6),
        st.integers(0, 3),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=3,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(
    turns=TURNS,
    num_blocks=st.integers(8, 12),
    num_host_blocks=st.sampled_from([2, 6, 40]),
    stores_all=st.booleans(),
    overlap=st.booleans(),
)
def test_whatever_stores_bring_the_tokens_are_right(
    turns: list[Any], num_blocks: int, num_host_blocks: int, stores_all: bool, overlap: bool
) -> None:
    """Turns of four chats: their length, role, the steps before the next one, what a load brings, and an abort."""
    driver = make_driver(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, stores_all=stores_all, max_model_len=30, overlap=overlap
    )
    prompts: dict[str, list[int]] = {}
    for number, (chat, num_tokens, role, num_steps, part, is_aborted) in enumerate(turns):
        request_id = f"r{number}"
        prompts[request_id] = list(range(1 + 100 * chat, 1 + 100 * chat + num_tokens))
        driver.scheduler.add_request(make_request(request_id, prompts[request_id], max_tokens=3, role=role))
        driver.news.ready_to_prefill.add(request_id)
        for _ in range(num_steps):
            driver.step()
        for loading in list(driver.loads):
            driver.end_load(loading, len(driver.loads[loading].blocks) * part // 3)
        if is_aborted and request_id in driver.scheduler.requests:
            driver.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            del prompts[request_id]
        driver.news.finished_sending |= set(driver.scheduler.remote.held) - driver.loads.keys()
    driver.run()
    assert driver.is_whole()
    for request_id, prompt in prompts.items():
        role = turns[int(request_id[1:])][2]
        right = reference_tokens(prompt, min(1 if role else 3, 30 - len(prompt)))
        assert driver.driver.tokens_of(request_id) == right
