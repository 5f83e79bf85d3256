"""How requests end, and what their clients are told.

Tests of actors/core/feasibility.py, actors/core/requests/abilities.py, actors/core/requests/stop.py,
actors/core/steps/step_update.py.
"""

from __future__ import annotations

import pytest

from actors.core.outputs.model_runner_output import ModelRunnerOutput, TokenLogprobs
from actors.core.requests.abilities import Ability
from actors.core.requests.request import FinishReason, Request, RequestStatus
from actors.core.requests.sampling_params import PoolingParams
from actors.core.vllm_view import get_num_unfinished_requests, has_unfinished_requests
from actors.errors import DuplicateRequest
from tests.actors.core.builders import EOS, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver

ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.mark.parametrize(
    ("request_", "sampled", "reason", "stop_token_id"),
    [
        (make_request("r", 4, max_tokens=9), [5, EOS], FinishReason.STOP, EOS),
        (make_request("r", 4, max_tokens=3, ignore_eos=True), [5, EOS, 6], FinishReason.LENGTH, None),
        (make_request("r", 4, max_tokens=9, stop_token_ids=(7,)), [5, 7], FinishReason.STOP, 7),
        (make_request("r", 4, max_tokens=2, stop_token_ids=(7,)), [5, 7], FinishReason.STOP, 7),
        (make_request("r", 4, max_tokens=9, min_tokens=3), [EOS, EOS, EOS], FinishReason.STOP, EOS),
        (make_request("r", 61, max_tokens=9), [5, 6, 7], FinishReason.LENGTH, None),
    ],
    ids=["eos", "ignored eos", "stop token", "stop and length at once", "min_tokens", "max_model_len"],
)
def test_a_request_ends_with_the_token_that_completes_it(
    request_: Request, sampled: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add_request(request_)
    for token_id in sampled:
        assert has_unfinished_requests(scheduler)
        outputs = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["r"], [[token_id]]))
    [end] = outputs[0].outputs
    assert (end.finish_reason, end.stop_token_id, end.new_token_ids) == (reason, stop_token_id, sampled[-1:])
    assert end.first_position == len(sampled) - 1
    assert outputs[0].finished_req_ids == {"r"}
    assert not has_unfinished_requests(scheduler)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("output_token_ids", "reason"),
    [([5, 6, 7], FinishReason.LENGTH), ([5, EOS], FinishReason.STOP)],
)
def test_a_request_that_is_complete_when_it_comes_ends_at_once(
    output_token_ids: list[int], reason: FinishReason
) -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 4, max_tokens=3, output_token_ids=output_token_ids))
    driver.step()
    assert driver.end_of("a").finish_reason is reason
    assert driver.steps[0].total_num_scheduled_tokens == 0


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (make_request("a", 30, max_tokens=11), ["30", "11", "blocks", "10"]),
        (make_request("a", 64), ["64", "max_model_len"]),
        (make_request("a", 70), ["70", "64"]),
        (make_request("a", 8, max_tokens=0), ["max_tokens is 0"]),
        (make_request("a", []), ["no tokens"]),
    ],
)
def test_what_can_never_run_is_refused_at_once_with_the_numbers(request_: Request, numbers: list[str]) -> None:
    driver = Driver(make_scheduler(num_blocks=10))
    driver.scheduler.add_request(request_)
    driver.scheduler.add_request(make_request("b", 8, max_tokens=1))
    driver.step()
    end = driver.end_of("a")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert all(number in end.error for number in numbers), end.error
    assert request_.status is RequestStatus.FINISHED_IGNORED
    assert list(driver.scheduled()) == ["b"]


def test_max_model_len_caps_what_a_request_may_need() -> None:
    driver = Driver(make_scheduler(num_blocks=16, max_model_len=64))
    driver.scheduler.add_request(make_request("a", 8, max_tokens=1000, ignore_eos=True))
    driver.run()
    assert len(driver.tokens_of("a")) == 56
    assert driver.end_of("a").finish_reason is FinishReason.LENGTH


def test_an_id_that_is_still_here_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    with pytest.raises(DuplicateRequest, match="a"):
        scheduler.add_request(make_request("a"))
    scheduler.finish_requests("a", ABORTED)
    scheduler.add_request(make_request("a"))
    scheduler.check_integrity()


def test_an_abort_ends_a_request_wherever_it_is_and_its_client_only_sees_its_id() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    for name in ("running", "waiting", "other"):
        driver.scheduler.add_request(make_request(name, 4))
    driver.step()
    driver.scheduler.finish_requests(["running", "waiting", "unknown"], ABORTED)
    driver.scheduler.finish_requests("running", ABORTED)
    assert get_num_unfinished_requests(driver.scheduler) == 1
    outputs = driver.step()
    assert driver.steps[-1].finished_req_ids == {"running", "waiting"}
    assert outputs[0].finished_req_ids == {"running", "waiting"}
    assert list(driver.scheduled()) == ["other"]


def test_a_request_that_is_aborted_while_its_step_runs_gets_nothing_of_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    scheduler.add_request(make_request("b", 4))
    output = scheduler.schedule()
    scheduler.finish_requests("a", ABORTED)
    outputs = scheduler.update_from_output(output, ModelRunnerOutput(["a", "b"], [[5], [6]]))
    assert [out.request_id for out in outputs[0].outputs] == ["b"]
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_an_id_that_comes_back_while_its_old_step_runs_gets_nothing_of_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    output = scheduler.schedule()
    scheduler.finish_requests("a", ABORTED)
    scheduler.add_request(make_request("a", 4))
    outputs = scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[5]]))
    assert outputs[0].outputs == []
    again = scheduler.schedule()
    assert again.finished_req_ids == {"a"}
    assert [new.req_id for new in again.scheduled_new_reqs] == ["a"]


def test_only_a_final_status_ends_a_request() -> None:
    with pytest.raises(ValueError, match="RUNNING"):
        make_scheduler().finish_requests("a", RequestStatus.RUNNING)


def test_an_engine_that_ends_a_request_says_why() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", client_index=3))
    driver.scheduler.finish_requests("a", ABORTED, error="drained")
    outputs = driver.step()
    assert [(out.finish_reason, out.error) for out in outputs[3].outputs] == [(FinishReason.ABORT, "drained")]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_request_past_its_deadline_ends_wherever_it_is(is_running: bool) -> None:
    clock = Clock()
    driver = Driver(make_scheduler(clock=clock, max_num_seqs=1))
    driver.scheduler.add_request(make_request("a", 4, max_tokens=9, ignore_eos=True, deadline_s=clock.now_s + 60.0))
    driver.scheduler.add_request(make_request("b", 4, deadline_s=clock.now_s + 5.0))
    driver.step()
    assert driver.scheduler.next_deadline() == clock.now_s + 5.0
    clock.now_s += 60.0 if is_running else 5.0
    driver.step()
    ended = "a" if is_running else "b"
    assert driver.end_of(ended).finish_reason is FinishReason.ABORT
    assert driver.end_of(ended).error == "deadline exceeded"
    assert driver.scheduler.next_deadline() == (None if is_running else clock.now_s + 55.0)


def test_a_finished_requests_deadline_is_forgotten() -> None:
    clock = Clock()
    driver = Driver(make_scheduler(clock=clock))
    driver.scheduler.add_request(make_request("a", 4, max_tokens=1, deadline_s=clock.now_s + 5.0))
    driver.run()
    assert driver.scheduler.next_deadline() is None


def test_outputs_go_to_the_client_that_asked() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", client_index=0))
    driver.scheduler.add_request(make_request("b", client_index=7))
    outputs = driver.step()
    assert {client: [out.request_id for out in news.outputs] for client, news in outputs.items()} == {
        0: ["a"],
        7: ["b"],
    }


def test_logprobs_travel_with_the_tokens_that_are_kept() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    logprobs = [TokenLogprobs([5], [-0.5], 1)]
    output = ModelRunnerOutput(["a"], [[5]], logprobs={"a": logprobs})
    assert scheduler.update_from_output(scheduler.schedule(), output)[0].outputs[0].logprobs == logprobs


def test_timings_tell_a_requests_life() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 12, max_tokens=1, now_s=clock.now_s))
    clock.now_s += 2.0
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[]]))
    second = scheduler.schedule()
    clock.now_s += 1.5
    [end] = scheduler.update_from_output(second, ModelRunnerOutput(["a"], [[5]]))[0].outputs
    assert end.timings is not None
    assert (end.timings.queued_s, end.timings.prefill_s) == (2.0, 1.5)
    assert (end.timings.num_prompt_tokens_computed, end.timings.num_preemptions) == (12, 0)
    assert [(change.status, change.at_s) for change in end.timings.status_changes] == [
        (RequestStatus.WAITING, 1000.0),
        (RequestStatus.RUNNING, 1002.0),
        (RequestStatus.FINISHED_LENGTH_CAPPED, 1003.5),
    ]


def test_shutdown_ends_every_request_and_tells_its_client() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.scheduler.add_request(make_request("a"))
    driver.scheduler.add_request(make_request("b"))
    driver.step()
    driver.scheduler.shutdown()
    driver.step()
    assert driver.end_of("a").error == driver.end_of("b").error == "the engine shuts down"
    assert not driver.scheduler.has_requests()


def test_an_output_that_repeats_itself_is_stopped_if_the_request_says_so() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=30, repetition_max_pattern=2, ignore_eos=True))
    ends = []
    for token_id in (5, 6, 7, 6, 7, 6, 7, 6):
        outputs = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[token_id]]))
        ends += [output for output in outputs[0].outputs if output.finished]
        if ends:
            break
    [end] = ends
    assert (end.first_position, end.finish_reason, end.stop_reason) == (6, FinishReason.STOP, "repetition")
    assert end.stop_token_id is None


def test_a_request_that_needs_what_the_engine_cannot_do_is_refused_and_not_run_without_it() -> None:
    driver = Driver(make_scheduler(worker_abilities=[Ability.GENERATION, Ability.POOLING]))
    driver.scheduler.add_request(make_request("a", 4, lora_name="x", pooling_params=PoolingParams()))
    driver.scheduler.add_request(make_request("b", 4, max_tokens=1))
    driver.run()
    assert driver.end_of("a").error == "the request needs LoRA adapters, which this engine does not have"
    assert driver.end_of("b").error is None
