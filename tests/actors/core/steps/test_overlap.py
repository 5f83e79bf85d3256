"""A step is scheduled while another one runs: same tokens, one token too many at most, no block given away early.

Tests of actors/core/steps/preemption.py, actors/core/steps/running_scheduler.py,
actors/core/outputs/scheduler_output.py.
"""

from __future__ import annotations

from collections import deque

import pytest

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import RequestStatus
from actors.core.scheduler import Scheduler
from actors.core.vllm_view import scheduled_cached_reqs
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens


class Pipeline:
    """Keeps one step under way, and executes each as late as can be."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.driver = Driver(scheduler)
        self.under_way: deque[SchedulerOutput] = deque()

    def schedule(self) -> SchedulerOutput:
        self.under_way.append(self.driver.scheduler.schedule())
        return self.under_way[-1]

    def update(self) -> None:
        output = self.under_way.popleft()
        outputs = self.driver.scheduler.update_from_output(output, self.driver.worker.execute(output))
        self.driver.outputs += [one for client in outputs.values() for one in client.outputs]
        self.driver.scheduler.check_integrity()

    def run(self) -> None:
        for _ in range(300):
            if not self.driver.scheduler.has_requests() and not self.under_way:
                return
            is_empty = self.schedule().total_num_scheduled_tokens == 0
            while len(self.under_way) == 2 or (self.under_way and is_empty):
                self.update()
        raise AssertionError("it does not end")

    def run_ahead(self, depth: int, num_steps: int) -> None:
        """Run num_steps steps, up to depth of them under way at once."""
        for _ in range(num_steps):
            while len(self.under_way) < depth:
                self.schedule()
            self.update()


def test_a_request_goes_on_before_its_last_token_is_known() -> None:
    scheduler = make_scheduler(overlap=True)
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("a", range(1, 7), max_tokens=4, ignore_eos=True))
    assert pipeline.schedule().num_scheduled_tokens == {"a": 6}
    second = pipeline.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    assert scheduled_cached_reqs(second).num_computed_tokens == [6]
    assert scheduled_cached_reqs(second).num_output_tokens == [1]
    pipeline.run()
    assert pipeline.driver.tokens_of("a") == reference_tokens(range(1, 7), 4, eos=-1)


def test_no_step_is_scheduled_that_max_tokens_makes_void() -> None:
    scheduler = make_scheduler(overlap=True)
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("a", 6, max_tokens=2, ignore_eos=True))
    sizes = [pipeline.schedule().total_num_scheduled_tokens for _ in range(3)]
    assert sizes == [6, 1, 0]


def test_what_a_step_computes_after_the_end_is_dropped_and_its_block_is_fenced_until_then() -> None:
    scheduler = make_scheduler(overlap=True)
    pipeline = Pipeline(scheduler)
    prompt = range(1, 5)
    stop = reference_tokens(prompt, 1, eos=-1)[0]
    scheduler.add_request(make_request("a", prompt, max_tokens=9, stop_token_ids=(stop,), ignore_eos=True))
    pipeline.schedule()
    pipeline.schedule()
    pipeline.update()
    pool = scheduler.kv_cache_manager.block_pool
    assert pipeline.driver.end_of("a").stop_token_id == stop
    assert (scheduler.kv_cache_manager.num_fenced_blocks, pool.num_free_blocks) == (2, 62)
    assert scheduler.has_requests()
    pipeline.update()
    assert pipeline.driver.tokens_of("a") == [stop]
    assert (scheduler.kv_cache_manager.num_fenced_blocks, pool.num_free_blocks) == (0, 64)


def test_an_abort_between_the_steps_is_final() -> None:
    scheduler = make_scheduler(overlap=True)
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("a", 6, max_tokens=9, ignore_eos=True))
    pipeline.schedule()
    pipeline.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    pipeline.update()
    pipeline.update()
    assert pipeline.driver.outputs == []


def test_preemption_waits_for_the_blocks_of_the_step_under_way_instead_of_preempting_more() -> None:
    scheduler = make_scheduler(overlap=True, num_blocks=7, max_num_seqs=4)
    pipeline = Pipeline(scheduler)
    prompts = {name: range(first, first + 6) for name, first in (("a", 1), ("b", 21), ("c", 41))}
    for name, prompt in prompts.items():
        scheduler.add_request(make_request(name, prompt, max_tokens=14, ignore_eos=True))
    pipeline.run()
    for name, prompt in prompts.items():
        assert pipeline.driver.tokens_of(name) == reference_tokens(prompt, 14, eos=-1)
    assert scheduler.make_stats().num_preemptions > 0


def test_a_request_that_can_only_preempt_itself_takes_its_token_first() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(overlap=True, num_blocks=9, max_num_seqs=1, connector=connector)
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("c", 12, max_tokens=2, role=TransferRole.CONSUMER))
    scheduler.add_request(make_request("a", 18, max_tokens=8, ignore_eos=True))
    for _ in range(40):
        pipeline.schedule()
        while len(pipeline.under_way) == 2:
            pipeline.update()
    # The load has four blocks, and a needs a sixth one for its token at position 20.
    assert list(connector.loading) == ["c"]
    assert len(pipeline.driver.tokens_of("a")) == 3
    assert scheduler.make_stats().num_preemptions <= 2


@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_victim_does_not_come_back_through_its_fenced_blocks_before_whom_it_made_room_for(
    depth: int, num_steps: int
) -> None:
    """It would be preempted again, in each step, and the more urgent request never get its blocks."""
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=9, policy="priority", overlap=True)
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("low", 4, max_tokens=20, priority=1, ignore_eos=True))
    pipeline.run_ahead(depth, num_steps=num_steps)
    scheduler.add_request(make_request("high", 22, max_tokens=5, ignore_eos=True))
    pipeline.run_ahead(depth, num_steps=90)
    assert len(pipeline.driver.tokens_of("high")) == 5
    assert len(pipeline.driver.tokens_of("low")) == 20
    assert scheduler.make_stats().num_preemptions <= 2


def test_nobody_joins_while_a_running_prompt_waits_for_fenced_blocks() -> None:
    """First come, first served: a short prompt is let in beside a long one that is cut, and preempted for it once."""
    scheduler = make_scheduler(
        num_blocks=8, max_num_batched_tokens=17, long_prefill_token_threshold=13, overlap=True, max_model_len=32
    )
    pipeline = Pipeline(scheduler)
    scheduler.add_request(make_request("long", 27, max_tokens=5, ignore_eos=True))
    scheduler.add_request(make_request("short", 4, max_tokens=16, ignore_eos=True))
    pipeline.run_ahead(2, num_steps=60)
    assert len(pipeline.driver.tokens_of("long")) == 5
    assert len(pipeline.driver.tokens_of("short")) == 16


def test_who_lacks_blocks_waits_for_fenced_ones_and_preempts_nobody() -> None:
    """Three requests fill the pool; one is aborted while a step is under way, and its block does for the first one."""
    scheduler = make_scheduler(num_blocks=6, overlap=True)
    pipeline = Pipeline(scheduler)
    for name, num_tokens in (("first", 16), ("second", 4), ("third", 4)):
        scheduler.add_request(make_request(name, num_tokens, max_tokens=8, ignore_eos=True))
    assert pipeline.schedule().num_scheduled_tokens == {"first": 16, "second": 4, "third": 4}
    scheduler.finish_requests("third", RequestStatus.FINISHED_ABORTED)
    kv = scheduler.kv_cache_manager
    assert (kv.block_pool.num_free_blocks, kv.num_fenced_blocks) == (0, 1)
    waiting = pipeline.schedule()
    assert (waiting.num_scheduled_tokens, waiting.preempted_req_ids) == ({}, set())
    pipeline.update()
    assert (kv.block_pool.num_free_blocks, kv.num_fenced_blocks) == (1, 0)
    assert pipeline.schedule().num_scheduled_tokens == {"first": 1}


def test_the_wait_that_a_victims_client_is_told_counts_the_victims_own_fenced_blocks() -> None:
    """They are free when the step under way is over, so the victim has room when the first of the others ends."""
    scheduler = make_scheduler(num_blocks=7, overlap=True)
    pipeline = Pipeline(scheduler)
    for name, first, max_tokens in (("a", 1, 5), ("b", 21, 9), ("c", 41, 9)):
        prompt = range(first, first + 7)
        scheduler.add_request(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True))
    pipeline.run()
    [told] = [output for output in pipeline.driver.outputs if output.preemption is not None]
    assert (told.request_id, told.preemption) == ("c", Preemption(num_computed_tokens=8, num_wait_steps=3))
