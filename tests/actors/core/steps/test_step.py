"""The contents of a step: budget, chunks, order of admission, prefix hits.

Tests of actors/core/outputs/engine_core_outputs.py, actors/core/outputs/model_runner_output.py,
actors/core/steps/client_outputs.py, actors/core/vllm_view.py.
"""

from __future__ import annotations

import pytest

from actors.core.outputs.model_runner_output import DraftTokenIds, ModelRunnerOutput
from actors.core.requests.request import RequestStatus
from actors.core.vllm_view import scheduled_cached_reqs
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, reference_tokens


def test_a_first_step_tells_the_worker_everything_and_later_ones_only_what_changed() -> None:
    driver = Driver(make_scheduler())
    request = make_request("a", range(1, 7), max_tokens=4, ignore_eos=True)
    driver.scheduler.add_request(request)
    for _ in range(4):
        driver.step()
    [new] = driver.steps[0].scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.output_token_ids) == ("a", [1, 2, 3, 4, 5, 6], [])
    assert (new.block_ids, new.num_computed_tokens, new.eos_token_ids) == (([0, 1],), 0, (0,))
    cached = [scheduled_cached_reqs(step) for step in driver.steps[1:]]
    assert [c.req_ids for c in cached] == [["a"]] * 3
    assert [c.new_block_ids for c in cached] == [[([],)], [([],)], [([2],)]]
    assert [c.num_computed_tokens for c in cached] == [[6], [7], [8]]
    assert [c.num_output_tokens for c in cached] == [[1], [2], [3]]
    assert [c.resumed_from_preemption for c in cached] == [[False]] * 3
    assert driver.tokens_of("a") == reference_tokens(range(1, 7), 4, eos=-1)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("a", 20, max_tokens=2, ignore_eos=True))
    driver.run()
    assert [step.num_scheduled_tokens for step in driver.steps if step.num_scheduled_tokens] == [
        {"a": 8},
        {"a": 8},
        {"a": 4},
        {"a": 1},
    ]


def test_running_requests_decode_before_a_prompt_takes_what_is_left() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("a", 4, max_tokens=9, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(make_request("b", 20))
    driver.step()
    assert driver.scheduled() == {"a": 1, "b": 7}


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = Driver(make_scheduler(max_num_seqs=2))
    for name in ("a", "b", "c"):
        driver.scheduler.add_request(make_request(name, 4, max_tokens=2, ignore_eos=True))
    driver.step()
    assert list(driver.scheduled()) == ["a", "b"]
    assert driver.scheduler.get_request_counts() == (2, 1)
    driver.step()
    driver.step()
    assert list(driver.scheduled()) == ["c"]


def test_a_long_prompt_is_held_back_only_while_others_wait() -> None:
    driver = Driver(make_scheduler(long_prefill_token_threshold=6, max_num_batched_tokens=20))
    driver.scheduler.add_request(make_request("a", 30))
    driver.step()
    assert driver.scheduled() == {"a": 20}
    driver = Driver(make_scheduler(long_prefill_token_threshold=6, max_num_batched_tokens=20))
    driver.scheduler.add_request(make_request("a", 30))
    driver.scheduler.add_request(make_request("b", 5))
    driver.step()
    assert driver.scheduled() == {"a": 6, "b": 5}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    driver = Driver(make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16))
    driver.scheduler.add_request(make_request("a", 10, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", 10, ignore_eos=True))
    driver.step()
    assert driver.scheduled() == {"a": 10}
    driver.step()
    assert driver.scheduled() == {"a": 1, "b": 10}


def test_without_chunked_prefill_a_prompt_above_the_budget_is_refused_with_the_numbers() -> None:
    driver = Driver(make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16))
    driver.scheduler.add_request(make_request("a", 17))
    driver.step()
    error = driver.end_of("a").error
    assert error is not None
    assert "17" in error
    assert "16" in error


def test_a_second_request_computes_only_what_the_prefix_cache_does_not_have() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", range(1, 13), max_tokens=1))
    driver.run()
    driver.scheduler.add_request(make_request("b", range(1, 13), max_tokens=1))
    driver.step()
    assert driver.scheduled() == {"b": 4}
    assert driver.steps[-1].scheduled_new_reqs[0].num_computed_tokens == 8
    timings = driver.end_of("b").timings
    assert timings is not None
    assert (timings.num_cached_tokens, timings.num_prompt_tokens_computed) == (8, 4)
    assert driver.tokens_of("b") == driver.tokens_of("a")


def test_a_prefix_that_is_still_being_computed_is_no_hit() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", range(1, 13)))
    driver.scheduler.add_request(make_request("b", range(1, 13)))
    driver.step()
    assert driver.scheduled() == {"a": 12, "b": 12}


def test_a_resumed_request_goes_on_at_its_next_position() -> None:
    prompt = range(1, 9)
    right = reference_tokens(prompt, 6, eos=-1)
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", prompt, max_tokens=6, output_token_ids=right[:3], ignore_eos=True))
    driver.run()
    assert driver.outputs[0].first_position == 3
    assert driver.tokens_of("a") == right[3:]
    assert driver.steps[0].scheduled_new_reqs[0].output_token_ids == right[:3]


def test_a_newcomer_leaves_the_watermark_to_those_that_run() -> None:
    driver = Driver(make_scheduler(num_blocks=10, watermark=0.3))
    driver.scheduler.add_request(make_request("a", 16, max_tokens=8, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", 14, max_tokens=2))
    driver.step()
    assert list(driver.scheduled()) == ["a"]
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert list(driver.scheduled()) == ["b"]


def test_a_request_without_room_is_not_overtaken() -> None:
    driver = Driver(make_scheduler(num_blocks=8))
    driver.scheduler.add_request(make_request("a", 16, max_tokens=4, ignore_eos=True))
    driver.scheduler.add_request(make_request("big", 24, max_tokens=2))
    driver.scheduler.add_request(make_request("small", 2, max_tokens=2))
    driver.step()
    assert list(driver.scheduled()) == ["a"]
    assert [request.request_id for request in driver.scheduler.waiting] == ["big", "small"]


def test_priority_admits_the_most_urgent_first() -> None:
    driver = Driver(make_scheduler(policy="priority", max_num_seqs=1))
    driver.scheduler.add_request(make_request("low", 4, priority=2, max_tokens=1))
    driver.scheduler.add_request(make_request("high", 4, priority=0, max_tokens=1))
    driver.step()
    assert list(driver.scheduled()) == ["high"]


def test_drafts_are_verified_in_one_step_and_rejected_ones_are_computed_over() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, max_tokens=20, ignore_eos=True))
    first = scheduler.schedule()
    scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[11]]))
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "gone"], [[12, 13, 14], [1]]))
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 4}
    assert second.scheduled_spec_decode_tokens == {"a": [12, 13, 14]}
    outputs = scheduler.update_from_output(second, ModelRunnerOutput(["a"], [[12, 99]]))
    assert outputs[0].outputs[0].new_token_ids == [12, 99]
    request = scheduler.requests["a"]
    assert (request.num_tokens, request.num_computed_tokens, request.spec_token_ids) == (11, 10, [])
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    scheduler.check_integrity()


def test_drafts_never_reach_beyond_a_requests_length() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, max_tokens=3, ignore_eos=True))
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[11]]))
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[12, 13, 14, 15]]))
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [12, 13]}
    [client] = scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[12, 13, 14]])).values()
    assert client.outputs[0].new_token_ids == [12, 13]
    assert client.outputs[0].finished


@pytest.mark.parametrize("num_requests", [1, 3])
def test_an_empty_step_follows_when_nothing_is_left(num_requests: int) -> None:
    driver = Driver(make_scheduler())
    for number in range(num_requests):
        driver.scheduler.add_request(make_request(f"r{number}", 5, max_tokens=1))
    driver.run()
    assert driver.steps[-1].total_num_scheduled_tokens == 0
    assert driver.steps[-1].finished_req_ids == {f"r{number}" for number in range(num_requests)}
    assert driver.scheduler.schedule().is_empty()


def test_lookahead_slots_are_there_beyond_every_step_but_not_beyond_the_longest_sequence() -> None:
    driver = Driver(make_scheduler(num_lookahead_tokens=5, num_speculative_tokens=2))
    prompt = range(1, 7)
    driver.scheduler.add_request(make_request("a", prompt, max_tokens=12, ignore_eos=True))
    for _ in range(12):
        driver.step()
        num_computed = driver.steps[-1].batch.num_computed_tokens[0] + driver.steps[-1].batch.num_new_tokens[0]
        num_slots = 4 * driver.scheduler.kv_cache_manager.num_blocks_of("a")
        assert num_slots >= min(num_computed + 5, 18) or "a" not in driver.scheduler.requests
    assert driver.tokens_of("a") == reference_tokens(prompt, 12, eos=-1)


def test_drafts_may_come_with_the_model_output_and_are_counted_by_position() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("a", 6, max_tokens=20, ignore_eos=True))
    drafts = DraftTokenIds(["a", "gone"], [[21, 22, 23], [1]])
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[11]], draft_token_ids=drafts))
    step = scheduler.schedule()
    assert (step.num_scheduled_tokens, step.scheduled_spec_decode_tokens) == ({"a": 4}, {"a": [21, 22, 23]})
    scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[21, 22, 9]]))
    stats = scheduler.make_stats().spec_decoding_stats
    assert stats is not None
    assert (stats.num_spec_tokens, stats.num_drafts, stats.num_draft_tokens) == (3, 1, 3)
    assert (stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos) == (2, [1, 1, 0])


def test_leading_blocks_that_all_running_requests_share_are_counted() -> None:
    driver = Driver(make_scheduler())
    shared = list(range(1, 9))
    counts = []
    for name, prompt in (("a", [*shared, 11]), ("b", [*shared, 12]), ("c", [*shared[:5], 13, 14, 15, 16])):
        driver.scheduler.add_request(make_request(name, prompt, max_tokens=9, ignore_eos=True))
        driver.step()
        counts += driver.steps[-1].num_common_prefix_blocks
    driver.scheduler.add_request(make_request("d", 4, max_tokens=9, ignore_eos=True))
    driver.step()
    assert [*counts, *driver.steps[-1].num_common_prefix_blocks] == [0, 2, 1, 0]
