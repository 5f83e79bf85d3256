"""The consumer's end of a handoff, as the scheduler drives it.

Tests of actors/core/loads/handoff_loads.py, actors/core/loads/loading_requests.py, actors/core/loads/remote_kv.py,
actors/core/loads/transfer_parts.py, actors/core/steps/waiting_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.core.requests.request import FinishReason, Request, RequestStatus
from actors.core.vllm_view import get_num_new_matched_tokens
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import TransferTimings
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.kv_transfer.reported import output_of

CONSUMER = TransferRole.CONSUMER
PROMPT = range(1, 11)
RIGHT = reference_tokens(PROMPT, 6, eos=-1)


def consumer(request_id: str = "c", prompt: Sequence[int] = PROMPT, **kwargs: Any) -> Request:
    return make_request(request_id, prompt, **{"max_tokens": 6, "ignore_eos": True, "role": CONSUMER, **kwargs})


def make_driver(**kwargs: Any) -> tuple[Driver, FakeConnector]:
    connector = FakeConnector(**({"max_reserved_requests": kwargs.pop("limit")} if "limit" in kwargs else {}))
    return Driver(make_scheduler(connector=connector, **kwargs)), connector


def load(driver: Driver, connector: FakeConnector, request: Request, num_tokens: int | None = None) -> None:
    """A link writes the KV of the first num_tokens tokens into the reserved blocks."""
    reservation = connector.loading[request.request_id]
    start = reservation.num_local_blocks * BLOCK_SIZE
    num_tokens = reservation.num_prompt_tokens if num_tokens is None else num_tokens
    driver.worker.write(reservation.block_ids, request.all_token_ids, start, num_tokens - start)


def report(request_id: str, outcome: LoadOutcome, num_tokens: int = 0, token: int | None = None) -> KVConnectorOutput:
    timings = TransferTimings(num_blocks=3, num_bytes=100, num_chunks=1, transfer_s=0.5, exposed_s=0.1)
    received = ReceivedKV(outcome, num_tokens, token, reason="link lost", timings=timings)
    return output_of(finished_recving={request_id: received})


def test_a_consumer_reserves_its_prompts_blocks_and_waits() -> None:
    driver, connector = make_driver()
    request = consumer(prompt=range(1, 13))
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.steps[-1].is_empty() is False
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    [reservation] = connector.metadata[-1].reservations
    assert (reservation.block_ids, reservation.num_local_blocks) == ((0, 1, 2), 0)
    # The first token's own KV needs a slot too, which is not the producer's business.
    assert driver.scheduler.kv_cache_manager.num_blocks_of("c") == 4
    assert driver.scheduler.make_stats().num_waiting_for_remote_kvs == 1
    assert driver.scheduler.get_request_counts() == (0, 1)


def test_requests_whose_loads_are_over_do_not_wait_for_each_others_blocks_to_look_ahead() -> None:
    """Found by the property machine: neither had room for the slots that it looks ahead, and nothing else ran."""
    driver, connector = make_driver(num_blocks=4, max_model_len=16, num_lookahead_tokens=5)
    requests = [consumer("a", range(1, 8), max_tokens=6), consumer("b", [50], max_tokens=2)]
    for request in requests:
        driver.scheduler.add_request(request)
    while driver.scheduler.has_requests():
        driver.step()
        loading = [request for request in requests if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        over = KVConnectorOutput()
        for request in loading:
            load(driver, connector, request)
            token = reference_tokens(request.prompt_token_ids, 1, eos=-1)[0]
            over.merge(report(request.request_id, LoadOutcome.LOADED, request.num_prompt_tokens, token))
        driver.step(over)
        assert len(driver.steps) < 100, "neither of them goes on"
    assert [request.num_output_tokens for request in requests] == [6, 2]


def test_a_loaded_request_runs_in_the_next_step_without_computing_any_prompt_token() -> None:
    driver, connector = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    assert driver.tokens_of("c") == []
    assert driver.scheduler.next_deadline() is None
    driver.step()
    [new] = driver.steps[-1].scheduled_new_reqs
    assert (new.num_computed_tokens, new.output_token_ids, driver.scheduled()) == (10, [RIGHT[0]], {"c": 1})
    driver.run()
    assert driver.tokens_of("c") == RIGHT[1:]
    assert next(output for output in driver.outputs if output.new_token_ids).first_position == 1
    timings = driver.end_of("c").timings
    assert timings is not None
    assert timings.num_prompt_tokens_computed == 0
    assert timings.transfer is not None
    assert [change.status.name for change in timings.status_changes] == [
        "WAITING",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING",
        "RUNNING",
        "FINISHED_LENGTH_CAPPED",
    ]
    assert driver.scheduler.make_stats().num_prompt_tokens_computed == 0
    assert [request_id for request_id, _, _ in connector.finished] == ["c"]


def test_loaded_blocks_serve_as_prefix_and_blocks_in_transfer_do_not() -> None:
    driver, connector = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduler.kv_cache_manager.get_computed_blocks(make_request("x", PROMPT)) == []
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    assert len(driver.scheduler.kv_cache_manager.get_computed_blocks(make_request("x", PROMPT))) == 2


def test_what_the_local_cache_has_is_not_asked_for() -> None:
    driver, connector = make_driver()
    driver.scheduler.add_request(make_request("a", range(1, 9), max_tokens=1))
    driver.step()
    request = consumer(prompt=range(1, 9))
    driver.scheduler.add_request(request)
    driver.step()
    assert connector.loading["c"].num_local_blocks == 2
    right = reference_tokens(range(1, 9), 6, eos=-1)
    driver.step(report("c", LoadOutcome.LOADED, 8, right[0]))
    driver.run()
    assert driver.tokens_of("c") == right[1:]
    timings = driver.end_of("c").timings
    assert timings is not None
    assert (timings.num_cached_tokens, timings.num_prompt_tokens_computed) == (8, 0)


def test_a_resumed_handoff_carries_all_its_tokens() -> None:
    driver, connector = make_driver()
    request = consumer(output_token_ids=RIGHT[:2])
    driver.scheduler.add_request(request)
    driver.step()
    assert connector.num_tokens["c"] == 12
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 12, RIGHT[2]))
    driver.run()
    assert driver.tokens_of("c") == RIGHT[3:]


def test_loads_take_neither_slots_nor_tokens() -> None:
    driver, _ = make_driver(max_num_seqs=2, max_num_batched_tokens=4)
    driver.scheduler.add_request(make_request("a", 4, max_tokens=30, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", 4, max_tokens=30, ignore_eos=True))
    driver.step()
    driver.step()
    driver.scheduler.add_request(consumer())
    driver.step()
    assert driver.scheduled() == {"a": 1, "b": 1}
    assert driver.scheduler.requests["c"].status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_consumer_over_the_limit_is_set_aside_and_starts_before_later_ones() -> None:
    driver, connector = make_driver(limit=1)
    for name, first in (("c1", 1), ("c2", 101), ("c3", 201)):
        driver.scheduler.add_request(consumer(name, range(first, first + 8)))
    driver.scheduler.add_request(make_request("local", 4))
    driver.step()
    assert list(connector.loading) == ["c1"]
    assert list(driver.scheduled()) == ["local"]
    driver.step(report("c1", LoadOutcome.RELEASED))
    driver.step()
    assert list(connector.loading) == ["c2"]


def test_a_released_request_ends_without_a_word_to_its_client() -> None:
    driver, _ = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    outputs = driver.step(report("c", LoadOutcome.RELEASED))
    assert outputs[0].outputs == []
    assert outputs[0].finished_req_ids == {"c"}
    assert request.status is RequestStatus.FINISHED_STOPPED
    driver.step()
    assert not driver.scheduler.has_requests()


def test_a_failed_load_is_recomputed_from_its_last_valid_block() -> None:
    driver, connector = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    load(driver, connector, request, 7)
    driver.step(report("c", LoadOutcome.FAILED, 7))
    driver.step()
    assert driver.steps[-1].scheduled_new_reqs[0].num_computed_tokens == 4
    assert driver.scheduled() == {"c": 6}
    driver.run()
    assert driver.tokens_of("c") == RIGHT
    timings = driver.end_of("c").timings
    assert timings is not None
    assert timings.num_prompt_tokens_computed == 6


@pytest.mark.parametrize("num_local", [0, 8])
def test_a_load_that_lost_only_the_first_token_computes_the_last_block_again(num_local: int) -> None:
    driver, connector = make_driver()
    if num_local:
        driver.scheduler.add_request(make_request("a", range(1, 9), max_tokens=1))
        driver.step()
    request = consumer(prompt=range(1, 9))
    driver.scheduler.add_request(request)
    driver.step()
    load(driver, connector, request)
    shared = driver.scheduler.kv_cache_manager.get_block_ids("c")[1]
    driver.step(report("c", LoadOutcome.FAILED, 8))
    driver.step()
    assert driver.scheduled() == {"c": 4}
    if num_local:
        # The second block is the cache's: another request may read it while this one computes.
        assert driver.scheduler.kv_cache_manager.get_block_ids("c")[1] != shared
    driver.run()
    assert driver.tokens_of("c") == reference_tokens(range(1, 9), 6, eos=-1)


def test_the_error_of_a_whole_load_without_the_first_token_says_what_is_missing() -> None:
    driver, _ = make_driver(load_failure_policy="fail")
    driver.scheduler.add_request(consumer())
    driver.step()
    driver.step(output_of(finished_recving={"c": ReceivedKV(LoadOutcome.LOADED, 10, None)}))
    reason = "the producer sent the prompt's whole KV without the first output token"
    assert driver.end_of("c").error == f"handoff failed: {reason}"


def test_vllms_scheduler_would_wait_for_a_load_and_for_nothing_else() -> None:
    driver, connector = make_driver(limit=1)
    request, other = consumer("c"), consumer("d")
    for added in (request, other):
        driver.scheduler.add_request(added)
    asked = [get_num_new_matched_tokens(connector, other, num_tokens) for num_tokens in (0, 8, 10)]
    assert asked == [(10, True), (2, True), (0, False)]
    driver.step()
    assert get_num_new_matched_tokens(connector, other, 0) == (None, False), "one is loading"


def test_a_failed_load_ends_the_request_if_that_is_the_policy() -> None:
    driver, connector = make_driver(load_failure_policy="fail")
    driver.scheduler.add_request(consumer())
    driver.step()
    driver.step(report("c", LoadOutcome.FAILED))
    assert driver.end_of("c").finish_reason is FinishReason.ERROR
    assert driver.end_of("c").error == "handoff failed: link lost"
    assert [request_id for request_id, _, _ in connector.finished] == ["c"]
    assert driver.scheduler.kv_cache_manager.holders() == set()


@pytest.mark.parametrize("outcome", list(LoadOutcome))
def test_an_abort_ends_the_request_at_once_and_frees_its_blocks_when_the_link_has_drained(
    outcome: LoadOutcome,
) -> None:
    driver, connector = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    driver.scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    outputs = driver.step()
    assert outputs[0].finished_req_ids == {"c"}
    assert connector.metadata[-1].consumer_cancels == (TransferKey.of_handoff("c"),)
    assert driver.scheduler.kv_cache_manager.holders() == {"c"}
    driver.step(report("c", outcome, 10, RIGHT[0] if outcome is LoadOutcome.LOADED else None))
    assert driver.scheduler.kv_cache_manager.holders() == set()
    assert driver.outputs == []
    assert connector.finished == [("c", ProducerEnd.ABORTED, None)]
    assert not driver.scheduler.has_requests()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_past_its_deadline_is_cancelled_and_then_fails_by_policy(policy: Any) -> None:
    clock = Clock()
    driver, connector = make_driver(clock=clock, handoff_timeout_s=10.0, load_failure_policy=policy)
    driver.scheduler.add_request(consumer())
    driver.step()
    assert driver.scheduler.next_deadline() == clock.now_s + 10.0
    clock.now_s += 10.0
    driver.step()
    assert connector.metadata[-1].consumer_cancels == (TransferKey.of_handoff("c"),)
    assert driver.scheduler.next_deadline() is None
    assert driver.scheduler.kv_cache_manager.holders() == {"c"}
    driver.step(report("c", LoadOutcome.CANCELLED))
    if policy == "fail":
        assert driver.end_of("c").error == "handoff failed: no KV arrived within 10 s"
    else:
        driver.run()
        assert driver.tokens_of("c") == RIGHT


def test_a_request_past_its_own_deadline_ends_while_its_blocks_drain() -> None:
    clock = Clock()
    driver, _ = make_driver(clock=clock)
    driver.scheduler.add_request(consumer(deadline_s=clock.now_s + 1.0))
    driver.step()
    clock.now_s += 1.0
    driver.step()
    assert driver.end_of("c").error == "deadline exceeded"
    assert driver.scheduler.kv_cache_manager.holders() == {"c"}


def test_late_duplicate_and_unknown_completions_are_counted_and_dropped() -> None:
    driver, connector = make_driver()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step(report("unknown", LoadOutcome.FAILED))
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    driver.step(report("c", LoadOutcome.FAILED))
    driver.step(output_of(finished_sending={"c"}))
    assert driver.scheduler.make_stats().num_late_completions == 3
    driver.run()
    assert driver.tokens_of("c") == RIGHT[1:]


def test_requests_that_hold_blocks_are_admitted_before_those_that_hold_none() -> None:
    driver, connector = make_driver(max_num_seqs=1)
    driver.scheduler.add_request(make_request("a", 4, max_tokens=3, ignore_eos=True))
    driver.step()
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    driver.scheduler.add_request(make_request("b", 4))
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    driver.step()
    assert driver.scheduled() == {"c": 1}


def test_a_load_is_granted_only_if_those_already_admitted_can_still_grow() -> None:
    driver, connector = make_driver(num_blocks=10)
    driver.scheduler.add_request(make_request("a", 4, max_tokens=24, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(consumer(prompt=range(1, 29)))
    driver.step()
    # a needs a third block in five tokens, and a load of eight could not be preempted for it.
    assert driver.scheduler.kv_cache_manager.block_pool.num_free_blocks == 8
    assert connector.loading == {}
    driver.run_until_finished("a")
    driver.step()
    assert list(connector.loading) == ["c"]


def test_a_client_that_asks_for_many_tokens_keeps_nobodys_load_out() -> None:
    driver, connector = make_driver(num_blocks=100, max_model_len=400)
    driver.scheduler.add_request(make_request("greedy", 4, max_tokens=295, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(consumer(prompt=range(1, 106)))
    driver.scheduler.add_request(make_request("local", 4, max_tokens=9, ignore_eos=True))
    driver.step()
    assert list(connector.loading) == ["c"]
    assert "local" in driver.scheduled()


def test_a_load_that_would_squeeze_others_out_is_passed_by_as_many_as_a_batch_and_no_more() -> None:
    """Small ones that keep coming do not starve it."""
    driver, connector = make_driver(num_blocks=10, max_num_seqs=3)
    driver.scheduler.add_request(make_request("a", 4, max_tokens=24, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(consumer(prompt=range(1, 29)))
    passed = []
    for number in range(40):
        driver.scheduler.add_request(make_request(f"small {number}", 2, max_tokens=1))
        driver.step()
        if connector.loading:
            break
        passed += [name for name in driver.scheduled() if name.startswith("small")]
    assert list(connector.loading) == ["c"]
    assert 1 <= len(passed) <= 3


def test_smaller_loads_pass_one_that_would_squeeze_others_out_and_it_keeps_its_place() -> None:
    driver, connector = make_driver(num_blocks=12)
    driver.scheduler.add_request(make_request("a", 4, max_tokens=24, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(consumer("large", range(1, 40)))
    driver.scheduler.add_request(consumer("small", range(101, 104)))
    driver.step()
    assert list(connector.loading) == ["small"]
    assert [request.request_id for request in driver.scheduler.waiting] == ["large"]


def test_a_load_is_never_preempted() -> None:
    driver, connector = make_driver(num_blocks=9)
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, 3, max_tokens=13, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(consumer(prompt=range(1, 12)))
    driver.step()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("c")
    driver.run_until_finished("a")
    driver.run_until_finished("b")
    assert driver.scheduler.make_stats().num_preemptions > 0
    assert driver.scheduler.kv_cache_manager.get_block_ids("c") == blocks
    assert list(connector.loading) == ["c"]


def test_a_loaded_request_that_is_preempted_goes_on_by_itself() -> None:
    driver, connector = make_driver(num_blocks=6)
    request = consumer(max_tokens=10)
    driver.scheduler.add_request(request)
    driver.step()
    load(driver, connector, request)
    driver.scheduler.add_request(make_request("a", 7, max_tokens=10, ignore_eos=True))
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions > 0
    assert driver.tokens_of("c") == reference_tokens(PROMPT, 10, eos=-1)[1:]
    assert len(connector.finished) == 1


def test_a_first_token_that_reaches_this_engines_own_limit_ends_the_request_here() -> None:
    driver, connector = make_driver(max_model_len=11)
    request = consumer()
    driver.scheduler.add_request(request)
    driver.step()
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    end = driver.end_of("c")
    assert (end.finish_reason, end.new_token_ids, end.first_position) == (FinishReason.LENGTH, [], 1)
    assert driver.scheduler.kv_cache_manager.holders() == set()


def test_a_refused_consumer_tells_its_producer() -> None:
    driver, connector = make_driver(num_blocks=2)
    driver.scheduler.add_request(consumer())
    driver.step()
    assert driver.end_of("c").finish_reason is FinishReason.ERROR
    assert connector.finished == [("c", ProducerEnd.ABORTED, None)]


def test_no_more_is_loaded_ahead_than_one_batch_and_others_may_pass() -> None:
    driver, connector = make_driver(max_num_seqs=2)
    for name, first in (("c1", 1), ("c2", 101), ("c3", 201)):
        driver.scheduler.add_request(consumer(name, range(first, first + 8)))
    driver.scheduler.add_request(make_request("local", 4))
    driver.step()
    assert list(connector.loading) == ["c1", "c2"]
    assert list(driver.scheduled()) == ["local"]


def test_loads_that_are_over_count_among_those_ahead_of_the_batch() -> None:
    driver, connector = make_driver(max_num_seqs=2)
    loads = [consumer(name, range(first, first + 8)) for name, first in (("c1", 1), ("c2", 101))]
    for request in loads:
        driver.scheduler.add_request(request)
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, 4, max_tokens=9, ignore_eos=True))
    driver.step()
    for request in loads:
        load(driver, connector, request)
        driver.step(report(request.request_id, LoadOutcome.LOADED, 8, 7))
    driver.scheduler.add_request(consumer("c3", range(201, 209)))
    driver.step()
    assert list(driver.scheduled()) == ["a", "b"]
    assert "c3" not in driver.scheduler.remote.loading


def test_no_load_starts_before_a_preempted_request_is_back() -> None:
    driver, _ = make_driver(num_blocks=12, limit=1)
    driver.scheduler.add_request(consumer("c1", range(1, 9), max_tokens=2))
    driver.scheduler.add_request(consumer("c2", range(101, 109), max_tokens=2))
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, 14, max_tokens=9, ignore_eos=True))
    driver.run_until_preempted()
    assert [request.request_id for request in driver.scheduler.remote.blocked_consumers] == ["c2"]
    driver.step(report("c1", LoadOutcome.RELEASED))
    driver.step()
    assert list(driver.scheduled()) == ["a", "b"]
    assert "c2" not in driver.scheduler.remote.loading


def test_requests_whose_load_is_over_run_as_soon_as_a_preemption_leaves_the_batch_empty() -> None:
    driver, connector = make_driver(num_blocks=7, max_num_seqs=1)
    request = consumer(prompt=range(1, 11), max_tokens=3)
    driver.scheduler.add_request(request)
    driver.scheduler.add_request(make_request("a", 8, max_tokens=10, ignore_eos=True))
    driver.step()
    load(driver, connector, request)
    driver.step(report("c", LoadOutcome.LOADED, 10, RIGHT[0]))
    driver.run_until_preempted()
    assert driver.steps[-1].preempted_req_ids == {"a"}
    assert driver.scheduled() == {"c": 1}
