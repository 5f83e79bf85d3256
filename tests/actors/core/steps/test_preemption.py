"""When blocks are short: who loses them, and that nobody's tokens change by it.

Tests of actors/core/requests/running_rows.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from actors.config import SchedulerConfig
from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.requests.request import RequestStatus
from actors.core.requests.running_rows import RunningRows
from actors.core.steps.step import Step
from actors.core.vllm_view import scheduled_cached_reqs
from tests.actors.core.builders import BLOCK_SIZE, make_request, make_scheduler
from tests.actors.core.fakes import Driver, reference_tokens


def test_fcfs_preempts_the_one_that_was_admitted_last() -> None:
    driver = Driver(make_scheduler(num_blocks=4))
    first = make_request("a", range(1, 8), max_tokens=6, ignore_eos=True)
    second = make_request("b", range(21, 28), max_tokens=6, ignore_eos=True)
    driver.scheduler.add_request(first)
    driver.scheduler.add_request(second)
    driver.step()
    driver.step()
    driver.step()
    assert driver.steps[-1].preempted_req_ids == {"b"}
    assert driver.scheduled() == {"a": 1}
    assert (second.status, second.num_computed_tokens, second.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert driver.scheduler.kv_cache_manager.num_blocks_of("b") == 0
    driver.run()
    assert driver.tokens_of("a") == reference_tokens(range(1, 8), 6, eos=-1)
    assert driver.tokens_of("b") == reference_tokens(range(21, 28), 6, eos=-1)
    assert driver.scheduler.make_stats().num_preemptions == 1


def test_a_resumed_request_replaces_its_blocks_at_the_worker() -> None:
    driver = Driver(make_scheduler(num_blocks=4))
    driver.scheduler.add_request(make_request("a", range(1, 8), max_tokens=6, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", range(21, 28), max_tokens=6, ignore_eos=True))
    driver.run()
    resumed = [
        (cached.new_block_ids[index][0], cached.num_computed_tokens[index])
        for cached in (scheduled_cached_reqs(step) for step in driver.steps)
        for index, is_resumed in enumerate(cached.resumed_from_preemption)
        if is_resumed
    ]
    [(block_ids, num_computed_tokens)] = resumed
    assert len(block_ids) >= 3
    assert num_computed_tokens % 4 == 0


def test_a_preempted_request_goes_before_those_that_were_waiting() -> None:
    driver = Driver(make_scheduler(num_blocks=4))
    for name, first in (("a", 1), ("b", 21), ("c", 41)):
        driver.scheduler.add_request(make_request(name, range(first, first + 7), max_tokens=6, ignore_eos=True))
    for _ in range(3):
        driver.step()
    assert [request.request_id for request in driver.scheduler.waiting] == ["b", "c"]


def test_priority_preempts_the_least_urgent_and_refunds_what_it_had_in_this_step() -> None:
    driver = Driver(make_scheduler(num_blocks=4, policy="priority", max_num_batched_tokens=32))
    low = make_request("low", range(1, 7), max_tokens=9, priority=5, ignore_eos=True)
    driver.scheduler.add_request(low)
    driver.step()
    driver.scheduler.add_request(make_request("high", range(21, 28), max_tokens=6, priority=0, ignore_eos=True))
    driver.step()
    assert list(driver.scheduler.running.by_id) == ["low", "high"]
    driver.step()
    # low comes first in the batch and was scheduled before high needed its third block.
    assert driver.scheduled() == {"low": 1, "high": 1}
    driver.step()
    assert driver.scheduled() == {"high": 1}
    assert driver.steps[-1].preempted_req_ids == {"low"}
    driver.run()
    assert driver.tokens_of("low") == reference_tokens(range(1, 7), 9, eos=-1)
    assert driver.tokens_of("high") == reference_tokens(range(21, 28), 6, eos=-1)


def test_a_victim_that_was_scheduled_in_this_step_gives_everything_back() -> None:
    rows = RunningRows(4, BLOCK_SIZE)
    victim, steady = make_request("a", 4), make_request("b", 4)
    for request in (victim, steady):
        request.num_computed_tokens = 3
        rows.add(request, num_slots=4, runs_ahead=True)
    step = Step(SchedulerConfig(), token_budget=10, now_s=0.0)
    step.take_steady(np.array([steady.row]))
    victim.spec_token_ids = [7, 8]
    step.new_block_ids[victim.row] = [1]
    step.take(victim, 3)
    assert (step.token_budget, step.spec_token_ids) == (6, {"a": [7, 8]})
    step.refund(victim)
    step.refund(steady)
    assert (step.token_budget, step.num_scheduled_tokens, step.new_block_ids, step.spec_token_ids) == (10, {}, {}, {})
    assert step.is_empty


def test_a_step_that_preempted_admits_nobody() -> None:
    driver = Driver(make_scheduler(num_blocks=4, policy="priority"))
    for priority, (name, first) in enumerate((("a", 1), ("b", 21)), start=1):
        prompt = range(first, first + 7)
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=6, priority=priority, ignore_eos=True))
    driver.step()
    driver.step()
    driver.scheduler.add_request(make_request("urgent", 2, max_tokens=1, priority=0))
    driver.step()
    assert driver.steps[-1].preempted_req_ids == {"b"}
    assert driver.scheduled() == {"a": 1}
    driver.step()
    assert driver.scheduled() == {"a": 1, "urgent": 2}


def test_the_least_urgent_request_preempts_itself() -> None:
    driver = Driver(make_scheduler(num_blocks=4, policy="priority"))
    driver.scheduler.add_request(make_request("low", range(1, 8), max_tokens=6, priority=5, ignore_eos=True))
    driver.scheduler.add_request(make_request("high", range(21, 28), max_tokens=4, priority=0, ignore_eos=True))
    for _ in range(3):
        driver.step()
    assert driver.steps[-1].preempted_req_ids == {"low"}
    assert driver.scheduled() == {"high": 1}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_tiny_cache_changes_nobodys_tokens(chunked: bool, caching: bool) -> None:
    driver = Driver(
        make_scheduler(
            num_blocks=6, max_num_batched_tokens=9, enable_chunked_prefill=chunked, enable_prefix_caching=caching
        )
    )
    prompts = {f"r{number}": range(number, number + 7) for number in range(1, 9)}
    for name, prompt in prompts.items():
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=14, ignore_eos=True))
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert driver.tokens_of(name) == reference_tokens(prompt, 14, eos=-1)
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks


def test_the_client_of_a_preempted_request_is_told_what_it_had_and_how_long_it_will_wait() -> None:
    driver = Driver(make_scheduler(num_blocks=4))
    driver.scheduler.add_request(make_request("a", range(1, 8), max_tokens=6, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", range(21, 28), max_tokens=6, ignore_eos=True, client_index=3))
    driver.step()
    driver.step()
    assert not [output for output in driver.outputs if output.preemption is not None]
    [told] = driver.step()[3].others
    assert (told.request_id, told.first_position, told.new_token_ids) == ("b", 2, [])
    # It needs three blocks, and has them when a, which has 2 of 6 tokens, ends.
    assert told.preemption == Preemption(num_computed_tokens=8, num_wait_steps=4)
    driver.run()
    assert len([output for output in driver.outputs if output.preemption is not None]) == 1


def test_who_is_preempted_by_a_reset_is_not_offered_to_others() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", max_tokens=9, ignore_eos=True))
    driver.step()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    assert not [output for output in driver.outputs if output.preemption is not None]


def rows_with(*requests: tuple[int, int, int]) -> RunningRows:
    """Requests that run: (tokens so far, tokens in the end, blocks)."""
    rows = RunningRows(8, BLOCK_SIZE)
    for index, (num_tokens, max_num_tokens, num_blocks) in enumerate(requests):
        request = make_request(f"r{index}", num_tokens, max_tokens=max_num_tokens - num_tokens)
        request.num_computed_tokens = num_tokens - 1
        rows.add(request, num_slots=num_blocks * BLOCK_SIZE, runs_ahead=False)
    return rows


@pytest.mark.parametrize(
    ("running", "num_blocks", "num_free", "expected"),
    [
        ([], 5, 0, 0),
        ([(8, 20, 2)], 3, 1, 12),
        ([(8, 20, 2)], 99, 1, 12),
        # The first to end gives back two blocks, and the other takes one more meanwhile.
        ([(8, 20, 2), (6, 10, 2)], 1, 0, 4),
        ([(8, 20, 2), (6, 10, 2)], 2, 0, 12),
        ([(8, 20, 2), (6, 10, 2)], 2, 1, 4),
    ],
)
def test_room_comes_when_those_that_run_end(
    running: list[tuple[int, int, int]], num_blocks: int, num_free: int, expected: int
) -> None:
    assert rows_with(*running).num_steps_until_free(num_blocks, num_free) == expected


def test_victims_of_one_step_wait_for_each_other() -> None:
    driver = Driver(make_scheduler(num_blocks=6))
    for index, (name, max_tokens) in enumerate((("a", 6), ("b", 6), ("c", 13), ("d", 13), ("e", 13), ("f", 13))):
        prompt = range(10 * index, 10 * index + 3)
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True))
    driver.run_until_preempted()
    told = {output.request_id: output.preemption for output in driver.outputs if output.preemption is not None}
    assert [request.request_id for request in driver.scheduler.waiting] == ["d", "e", "f"]
    # Two blocks each. When a and b end, after 4 more tokens, c has taken one of their four.
    assert told == {"d": Preemption(4, 4), "e": Preemption(4, 11), "f": Preemption(4, 11)}
