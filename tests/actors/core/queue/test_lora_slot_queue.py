"""At most max_loras adapters in a batch: requests for others are skipped, and come back in their order.

Tests of actors/core/queue/lora_waits.py, actors/core/queue/scheduler_queues.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from actors.config import SchedulerConfig
from actors.core.queue.lora_waits import LoraWaits
from actors.core.requests.request import RequestStatus
from actors.core.requests.running_rows import RunningRows
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, loaded
from tests.kv_transfer.reported import output_of


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
    driver.step(output_of(finished_recving={"c": loaded(4, 7)}))
    driver.step()
    assert driver.scheduled() == {"a": 1}
    assert driver.scheduler.kv_cache_manager.num_blocks_of("c") == 2
    driver.run_until_finished("a")
    driver.step()
    assert driver.scheduled() == {"c": 1}
    driver.run()


class _Streams:
    """An engine with adapters for which requests never stop coming, one second a step."""

    def __init__(self, *names: str, max_loras: int = 1, **settings: Any) -> None:
        self.names = names
        self.clock = Clock()
        self.scheduler = make_scheduler(max_loras=max_loras, max_lora_wait_s=10.0, clock=self.clock, **settings)
        self.driver = Driver(self.scheduler)
        self.num_requests = 0

    def add(self, request_id: str, lora_name: str | None, **settings: Any) -> None:
        settings = {"max_tokens": 3, "ignore_eos": True} | settings
        self.scheduler.add_request(
            make_request(request_id, 4, lora_name=lora_name, arrival_time_s=self.clock.now_s, **settings)
        )

    def run(self, num_steps: int, **settings: Any) -> list[str]:
        """Returns which requests were admitted, in their order."""
        before = {request_id for step in self.driver.steps for request_id in step.num_scheduled_tokens}
        for _ in range(num_steps):
            for name in self.names:
                self.num_requests += 1
                self.add(f"{name}-{self.num_requests}", name, **settings)
            self.driver.step()
            self.scheduler.check_integrity()
            self.clock.now_s += 1.0
        admitted = dict.fromkeys(i for step in self.driver.steps for i in step.num_scheduled_tokens)
        return [request_id for request_id in admitted if request_id not in before]


@pytest.mark.parametrize("fairness", ["none", "ingress", "tenant"])
def test_an_adapter_that_waits_is_reached_although_requests_for_others_never_stop(fairness: Any) -> None:
    streams = _Streams("x", fairness=fairness)
    streams.run(2)
    streams.add("late", "y", tenant="another", client_index=1)
    assert "late" not in streams.run(10), "it has not waited for long enough"
    admitted = streams.run(6)
    assert "late" in admitted, "the three tokens of the last one of x are through"
    assert len(admitted) > 1, "then the others go on"


def test_requests_without_adapters_join_while_an_adapter_gives_way() -> None:
    streams = _Streams("x")
    streams.run(2)
    streams.add("late", "y")
    streams.run(11)
    streams.add("plain", None)
    assert streams.run(1) == ["plain"]


def test_only_the_adapter_that_has_been_in_the_batch_longest_gives_way() -> None:
    streams = _Streams("x", "y", max_loras=2, max_num_seqs=16, max_num_batched_tokens=64)
    streams.run(2)
    streams.add("late", "z")
    streams.run(10)
    admitted = streams.run(6)
    assert "late" in admitted
    before = admitted[: admitted.index("late")]
    assert before
    assert all(request_id.startswith("y") for request_id in before)


def test_adapters_take_turns_if_there_are_more_of_them_than_slots() -> None:
    streams = _Streams("x", "y", "z", max_num_seqs=16, max_num_batched_tokens=64)
    turns = [request_id[0] for request_id in streams.run(120)]
    order = [name for name, before in zip(turns, [None, *turns], strict=False) if name != before]
    assert order[:6] == ["x", "y", "z", "x", "y", "z"]


def test_nobody_gives_way_any_longer_when_who_waited_has_gone() -> None:
    streams = _Streams("x")
    streams.run(2)
    streams.add("late", "y")
    streams.run(11)
    streams.scheduler.finish_requests("late", RequestStatus.FINISHED_ABORTED)
    assert streams.run(2)


def test_the_last_free_slot_is_kept_for_the_adapter_that_has_waited_too_long() -> None:
    config = SchedulerConfig(max_loras=1, max_lora_wait_s=10.0)
    waits = LoraWaits(config, RunningRows(8, BLOCK_SIZE))
    late = make_request("late", lora_name="y", arrival_time_s=0.0)
    newer = make_request("newer", lora_name="x", arrival_time_s=1.0)
    waits.begin(late, 0.0)
    waits.look(9.0)
    assert waits.may_join(newer), "nobody has waited for too long yet"
    waits.look(11.0)
    assert not waits.may_join(newer)
    assert waits.may_join(late)


def test_more_urgent_requests_are_not_held_back() -> None:
    streams = _Streams("x", policy="priority")
    streams.run(2, priority=1)
    streams.add("late", "y", priority=2)
    assert "late" not in streams.run(30, priority=1)


def test_who_is_preempted_comes_back_when_who_waited_longer_has_had_its_turn() -> None:
    streams = _Streams(max_loras=1)
    streams.add("old", "x", max_tokens=30)
    streams.driver.step()
    streams.add("late", "y")
    streams.clock.now_s += 11.0
    streams.driver.step()
    streams.scheduler.reset_prefix_cache(reset_running_requests=True)
    streams.driver.run()
    assert streams.driver.end_of("old").finish_reason is not None
    assert streams.driver.end_of("late").finish_reason is not None


def test_loads_that_come_after_who_waits_too_long_wait_too() -> None:
    connector = FakeConnector()
    streams = _Streams("x", connector=connector)
    streams.run(2)
    streams.add("late", "y")
    streams.run(11)
    streams.add("load", "z", role=TransferRole.CONSUMER)
    streams.add("plain load", None, role=TransferRole.CONSUMER)
    streams.driver.step()
    assert set(connector.loading) == {"plain load"}
    assert "late" in streams.run(5)
    assert set(connector.loading) == {"load", "plain load"}
