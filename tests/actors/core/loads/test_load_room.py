"""Blocks that preemption cannot free are not counted as room for those that run; test_handoff_consumer.py has more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.core.requests.request import Request, RequestStatus
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector
from tests.kv_transfer.reported import output_of


def consumer(request_id: str, prompt: Sequence[int]) -> Request:
    return make_request(request_id, prompt, max_tokens=6, ignore_eos=True, role=TransferRole.CONSUMER)


def make_driver(**kwargs: Any) -> Driver:
    return Driver(make_scheduler(connector=FakeConnector(), num_blocks=10, **kwargs))


def test_the_blocks_of_a_running_producer_are_not_left_for_the_growth_of_others() -> None:
    """Five of ten blocks are the producer's: a load of five is free, and would leave nothing to grow into."""
    driver = make_driver(max_num_batched_tokens=8)
    producer = make_request("p", range(101, 121), max_tokens=6, ignore_eos=True, role=TransferRole.PRODUCER)
    driver.scheduler.add_request(producer)
    driver.step(output_of(ready_to_prefill={"p"}))
    driver.step()
    assert "p" in driver.scheduled()
    driver.scheduler.add_request(consumer("c", range(1, 17)))
    driver.step()
    assert (list(driver.scheduler.running.by_id), driver.scheduler.remote.loading) == (["p"], {})
    assert driver.scheduler.kv_cache_manager.block_pool.num_free_blocks == 5


def test_blocks_that_a_link_still_writes_are_not_left_for_the_growth_of_others() -> None:
    """The request of five of ten blocks was aborted, and its load is not over: only then does the next load begin."""
    driver = make_driver()
    driver.scheduler.add_request(consumer("c1", range(101, 117)))
    driver.step()
    driver.scheduler.finish_requests("c1", RequestStatus.FINISHED_ABORTED)
    driver.scheduler.add_request(consumer("c2", range(1, 17)))
    driver.step()
    assert driver.scheduler.kv_cache_manager.block_pool.num_free_blocks == 5
    assert driver.scheduler.remote.loading == {}
    driver.step(output_of(finished_recving={"c1": ReceivedKV(LoadOutcome.CANCELLED, reason="aborted")}))
    driver.step()
    assert list(driver.scheduler.remote.loading) == ["c2"]
