"""The producer's end of a handoff, as the scheduler drives it."""

from __future__ import annotations

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason, RequestStatus
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, EOS, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, next_token, reference_tokens
from tests.kv_transfer.reported import output_of

PRODUCER = TransferRole.PRODUCER


def ending_prompt(*, with_eos: bool) -> list[int]:
    """A prompt of nine tokens whose first output token is, or is not, EOS."""
    return next(
        prompt
        for prompt in ([number, *range(1, 9)] for number in range(1000))
        if (next_token(prompt) == EOS) == with_eos
    )


def test_a_producer_without_ready_is_skipped_and_blocks_nobody() -> None:
    driver = Driver(make_scheduler(connector=FakeConnector()))
    driver.scheduler.add_request(make_request("p", 8, role=PRODUCER))
    driver.scheduler.add_request(make_request("local", 8))
    driver.step()
    assert list(driver.scheduled()) == ["local"]
    assert driver.scheduler.kv_cache_manager.holders() == {"local"}
    driver.step(output_of(ready_to_prefill={"p"}))
    driver.step()
    assert "p" in driver.scheduled()


def test_a_producer_past_its_deadline_ends_while_it_waits_for_ready() -> None:
    clock, connector = Clock(), FakeConnector()
    driver = Driver(make_scheduler(connector=connector, clock=clock))
    driver.scheduler.add_request(make_request("p", 8, role=PRODUCER, deadline_s=clock.now_s + 5.0))
    driver.step()
    clock.now_s += 5.0
    driver.step(output_of(ready_to_prefill={"p"}))
    assert driver.end_of("p").error == "deadline exceeded"
    assert connector.finished == [("p", ProducerEnd.ABORTED, None)]
    assert driver.scheduler.kv_cache_manager.holders() == set()


def test_a_producer_past_its_deadline_ends_between_two_chunks_and_is_held_until_they_have_left() -> None:
    clock, connector = Clock(), FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, clock=clock, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("p", 18, role=PRODUCER, deadline_s=clock.now_s + 5.0))
    driver.step()
    clock.now_s += 5.0
    driver.step()
    assert driver.end_of("p").error == "deadline exceeded"
    assert driver.scheduled() == {}
    assert driver.scheduler.make_stats().num_held_reqs == 1
    driver.step(output_of(finished_sending={"p"}))
    assert driver.scheduler.kv_cache_manager.holders() == set()
    assert not driver.scheduler.has_requests()


def test_a_deadline_that_passes_while_a_request_is_held_changes_nothing() -> None:
    clock, connector = Clock(), FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, clock=clock))
    prompt = ending_prompt(with_eos=False)
    driver.scheduler.add_request(make_request("p", prompt, role=PRODUCER, deadline_s=clock.now_s + 5.0))
    driver.step()
    assert driver.end_of("p").end_cause is EndCause.HANDED_OVER
    assert driver.scheduler.next_deadline() is None
    clock.now_s += 5.0
    driver.step()
    assert driver.scheduler.kv_cache_manager.holders() == {"p"}
    driver.step(output_of(finished_sending={"p"}))
    assert driver.scheduler.kv_cache_manager.holders() == set()


def test_ready_that_came_before_the_request_lets_it_start_at_once() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(make_request("p", 8, role=PRODUCER))
    driver.step()
    assert driver.scheduled() == {"p": 8}


def test_each_chunk_is_told_to_the_connector_with_all_blocks_of_the_prompt() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("p", 18, role=PRODUCER))
    for _ in range(3):
        driver.step()
    progress = [metadata.progress[0] for metadata in connector.metadata]
    assert [(p.num_computed_tokens_before, p.num_computed_tokens_after) for p in progress] == [
        (0, 8),
        (8, 16),
        (16, 18),
    ]
    assert [p.block_ids for p in progress] == [(0, 1, 2, 3, 4)] * 3


def test_blocks_that_hit_the_cache_are_in_the_first_progress() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(make_request("a", range(1, 9), max_tokens=1))
    driver.step()
    driver.scheduler.add_request(make_request("p", range(1, 11), role=PRODUCER))
    driver.step()
    assert connector.metadata[-1].progress[0].num_computed_tokens_before == 8


def test_its_first_token_hands_the_request_over_and_its_blocks_stay_until_they_are_sent() -> None:
    connector = FakeConnector(ready={"p"})
    prompt = ending_prompt(with_eos=False)
    driver = Driver(make_scheduler(connector=connector))
    request = make_request("p", prompt, max_tokens=9, role=PRODUCER)
    driver.scheduler.add_request(request)
    driver.step()
    end = driver.end_of("p")
    assert (end.end_cause, end.finish_reason, end.first_position) == (EndCause.HANDED_OVER, None, 0)
    assert end.new_token_ids == [next_token(prompt)]
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert connector.finished == [("p", ProducerEnd.HANDED_OVER, next_token(prompt))]
    kv = driver.scheduler.kv_cache_manager
    assert kv.num_blocks_of("p") == 3
    assert driver.scheduler.make_stats().num_held_reqs == 1
    assert driver.scheduler.has_requests()
    driver.step(output_of(finished_sending={"p"}))
    assert kv.num_blocks_of("p") == 0
    assert not driver.scheduler.has_requests()


@pytest.mark.parametrize(("with_eos", "max_tokens"), [(True, 9), (False, 1)])
def test_a_first_token_that_ends_the_request_ends_it_here(with_eos: bool, max_tokens: int) -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(
        make_request("p", ending_prompt(with_eos=with_eos), max_tokens=max_tokens, role=PRODUCER)
    )
    driver.step()
    assert driver.end_of("p").end_cause is None
    assert driver.end_of("p").finish_reason is (FinishReason.STOP if with_eos else FinishReason.LENGTH)
    assert [(end, token) for _, end, token in connector.finished] == [(ProducerEnd.FINISHED_HERE, None)]


def test_a_resumed_request_is_handed_over_at_its_next_position() -> None:
    prompt = range(1, 9)
    right = reference_tokens(prompt, 4, eos=-1)
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(
        make_request("p", prompt, max_tokens=9, output_token_ids=right[:3], role=PRODUCER, ignore_eos=True)
    )
    driver.step()
    assert connector.num_tokens["p"] == 11
    assert (driver.end_of("p").first_position, driver.end_of("p").new_token_ids) == (3, [right[3]])
    assert connector.finished == [("p", ProducerEnd.HANDED_OVER, right[3])]


def test_an_aborted_producer_keeps_its_blocks_until_the_link_has_let_go() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("p", 18, role=PRODUCER))
    driver.step()
    driver.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    assert connector.finished == [("p", ProducerEnd.ABORTED, None)]
    assert driver.scheduler.kv_cache_manager.num_blocks_of("p") == 5
    driver.step()
    assert driver.scheduled() == {}
    driver.step(output_of(finished_sending={"p"}))
    assert driver.scheduler.kv_cache_manager.holders() == set()


def test_a_producer_that_never_started_frees_at_once() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(make_request("p", 8, role=PRODUCER))
    driver.step()
    driver.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert not driver.scheduler.has_requests()
    assert [end for _, end, _ in connector.finished] == [ProducerEnd.ABORTED]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_producer_whose_consumer_is_gone_ends_with_the_reason(is_running: bool) -> None:
    connector = FakeConnector(ready={"p"} if is_running else set())
    driver = Driver(make_scheduler(connector=connector, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("p", 18, role=PRODUCER))
    driver.step()
    driver.step(output_of(failed_sending={"p": "link lost"}))
    assert driver.end_of("p").finish_reason is FinishReason.ERROR
    assert driver.end_of("p").error == "handoff failed: link lost"
    assert connector.finished == [("p", ProducerEnd.ABORTED, None)]


def test_a_consumer_that_is_gone_in_the_very_step_of_the_first_token_ends_the_request() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(make_request("p", 8, max_tokens=9, role=PRODUCER, ignore_eos=True))
    driver.step(output_of(failed_sending={"p": "link lost"}))
    assert driver.tokens_of("p") == []
    assert driver.end_of("p").finish_reason is FinishReason.ERROR


def test_a_producer_is_admitted_only_if_its_whole_prompt_fits() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, num_blocks=6, max_num_batched_tokens=4))
    driver.scheduler.add_request(make_request("a", 8, max_tokens=4, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(make_request("p", 20, role=PRODUCER))
    driver.step()
    assert driver.scheduler.kv_cache_manager.holders() == {"a"}
    while "a" in driver.scheduler.requests:
        driver.step()
    driver.step()
    assert driver.scheduled() == {"p": 4}
    assert driver.scheduler.kv_cache_manager.num_blocks_of("p") == 5


def test_a_producer_needs_no_room_for_the_tokens_that_others_will_generate() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, num_blocks=2))
    driver.scheduler.add_request(make_request("p", 8, max_tokens=40, role=PRODUCER, ignore_eos=True))
    driver.step()
    assert driver.end_of("p").end_cause is EndCause.HANDED_OVER


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_producer_is_never_preempted(policy: str) -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(
        make_scheduler(
            connector=connector,
            num_blocks=7,
            max_num_batched_tokens=3,
            policy="priority" if policy == "priority" else "fcfs",
        )
    )
    driver.scheduler.add_request(make_request("a", 3, max_tokens=20, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(make_request("p", 5 * BLOCK_SIZE, priority=9, role=PRODUCER))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.make_stats().num_preemptions == 1
    assert list(driver.scheduler.running.by_id) == ["p"]
    assert [request.request_id for request in driver.scheduler.waiting] == ["a"]


def test_late_duplicate_and_unknown_completions_are_counted_and_dropped() -> None:
    connector = FakeConnector(ready={"p"})
    driver = Driver(make_scheduler(connector=connector, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("p", 12, max_tokens=9, role=PRODUCER, ignore_eos=True))
    driver.step(output_of(finished_sending={"p", "unknown"}, failed_sending={"nobody": "x"}))
    assert driver.scheduler.make_stats().num_late_completions == 3
    driver.step()
    assert driver.scheduler.kv_cache_manager.num_blocks_of("p") == 3
    driver.step(output_of(finished_sending={"p"}))
    driver.step(output_of(finished_sending={"p"}, ready_to_prefill={"p"}, failed_sending={"p": "x"}))
    assert driver.scheduler.make_stats().num_late_completions == 5


def test_a_refused_producer_tells_its_consumer() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector=connector, num_blocks=2))
    driver.scheduler.add_request(make_request("p", 9, role=PRODUCER))
    driver.step()
    assert driver.end_of("p").finish_reason is FinishReason.ERROR
    assert connector.finished == [("p", ProducerEnd.ABORTED, None)]


def test_a_ticket_without_a_connector_is_refused() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("p", 8, role=PRODUCER))
    driver.step()
    assert driver.end_of("p").error == "the request needs handoffs, which this engine does not have"


@pytest.mark.parametrize("num_tokens", [20, 24])
def test_a_producer_whose_prompt_fills_the_pool_runs_with_slots_to_look_ahead(num_tokens: int) -> None:
    """It gives one token and is over: it needs no slot to look ahead, and those behind it do not wait for ever."""
    driver = Driver(make_scheduler(num_blocks=6, num_lookahead_tokens=5, connector=FakeConnector()))
    driver.scheduler.add_request(make_request("p", num_tokens, role=TransferRole.PRODUCER))
    driver.scheduler.add_request(make_request("behind", 4))
    driver.step(output_of(ready_to_prefill={"p"}))
    driver.run_until_finished("p")
    driver.step(output_of(finished_sending={"p"}))
    driver.run(max_steps=50)
    assert driver.end_of("p").end_cause is EndCause.HANDED_OVER
