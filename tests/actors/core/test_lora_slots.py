"""At most max_loras adapters in a batch: requests for others are skipped, and come back in their order."""

from __future__ import annotations

from actors.core.request import RequestStatus
from kv_transfer.connector import KVConnectorOutput
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, loaded


def test_a_request_without_a_slot_lets_those_behind_it_pass() -> None:
    driver = Driver(make_scheduler(max_loras=1))
    for request_id, lora_name in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        driver.scheduler.add_request(make_request(request_id, 4, lora_name=lora_name, max_tokens=3, ignore_eos=True))
    driver.step()
    assert driver.scheduled() == {"a": 4, "c": 4, "d": 4}
    assert driver.scheduler.get_request_counts() == (3, 1)
    driver.run()
    assert driver.end_of("b").finish_reason is not None


def test_adapters_that_wait_get_a_slot_in_the_order_of_their_requests() -> None:
    driver = Driver(make_scheduler(max_loras=1))
    for request_id, lora_name in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "y")):
        driver.scheduler.add_request(make_request(request_id, 4, lora_name=lora_name, max_tokens=1))
    driver.run()
    batches = [sorted(step.num_scheduled_tokens) for step in driver.steps if step.num_scheduled_tokens]
    assert batches == [["a"], ["b", "d"], ["c"]]


def test_the_worker_is_told_the_adapter() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 4, lora_name="x"))
    driver.step()
    assert [new.lora_name for new in driver.steps[0].scheduled_new_reqs] == ["x@0"]


def test_a_request_that_is_set_aside_can_be_aborted() -> None:
    driver = Driver(make_scheduler(max_loras=1))
    driver.scheduler.add_request(make_request("a", 4, lora_name="x", ignore_eos=True))
    driver.scheduler.add_request(make_request("b", 4, lora_name="y"))
    driver.step()
    driver.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    driver.scheduler.check_integrity()
    driver.run()
    assert not any("b" in step.num_scheduled_tokens for step in driver.steps)


def test_a_loaded_request_waits_for_its_slot_with_its_blocks() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(max_loras=1, connector=connector))
    driver.scheduler.add_request(make_request("a", 4, lora_name="x", max_tokens=4, ignore_eos=True))
    driver.scheduler.add_request(
        make_request("c", 4, lora_name="y", role=TransferRole.CONSUMER, max_tokens=3, ignore_eos=True)
    )
    driver.step()
    block_ids = connector.loading["c"].block_ids
    driver.worker.write(block_ids, driver.scheduler.requests["c"].all_token_ids, 0, 4)
    driver.step(KVConnectorOutput(finished_recving={"c": loaded(4, 7)}))
    driver.step()
    assert driver.scheduled() == {"a": 1}
    assert driver.scheduler.kv_cache_manager.num_blocks_of("c") == 2
    driver.run_until_finished("a")
    driver.step()
    assert driver.scheduled() == {"c": 1}
    driver.run()
