"""The cause names what a slow request waited for longest, and nothing where it did not wait.

Tests of cluster/observability/stories/silent_engines.py.
"""

from __future__ import annotations

import msgspec
import pytest

from cluster.observability.stories.make_story import make_story
from cluster.routing.request_record import AttemptRecord, EngineQueue, EngineTimes, RequestRecord, StatusAt
from tests.cluster.observability.stories.story_samples import ALONE, CONSUMER, HANDOFF, PRODUCER, ended, preempted

replace = msgspec.structs.replace


def cause(*attempts: AttemptRecord, **given: object) -> str:
    return make_story(ended(*attempts, **given)).cause


def later(*statuses: StatusAt, from_s: float, by_s: float) -> tuple[StatusAt, ...]:
    return tuple(one if one.at_s < from_s else StatusAt(one.status, one.at_s + by_s) for one in statuses)


def test_a_request_that_never_waited_names_its_longest_work() -> None:
    expected = "no long wait: decode-0 generated 30 tokens for 4.00 s of 6.20 s, 100.0 ms between tokens (median)"
    assert cause() == expected
    prefill = replace(ALONE, decode=replace(_report(ALONE), prefill_s=2.4))
    expected = "no long wait: both-0 computed the prompt of 100 tokens for 2.40 s of 3.00 s"
    assert cause(prefill, duration_s=3.0, ttft_s=2.9) == expected


def _report(attempt: AttemptRecord) -> EngineTimes:
    assert attempt.decode is not None
    return attempt.decode


def test_a_queue_at_the_prefill_engine_is_named_with_its_prediction() -> None:
    attempt = replace(HANDOFF, prefill=replace(PRODUCER, queued_s=2.3))
    expected = "waited 2.10 s in the queue of prefill-0, where 200.0 ms were predicted: other requests came first"
    assert cause(attempt, ttft_s=3.4) == expected


def test_a_decode_engine_without_room_is_named_and_not_the_prefill_engine_that_waits_for_it() -> None:
    attempt = replace(HANDOFF, prefill=replace(PRODUCER, queued_s=2.3), decode=replace(CONSUMER, queued_s=2.2))
    expected = "waited 2.20 s until decode-0 reserved blocks: its KV cache or its batch was full"
    assert cause(attempt, ttft_s=3.4) == expected


def test_a_slow_link_is_named_with_its_rate() -> None:
    statuses = later(*CONSUMER.statuses, from_s=1.0, by_s=2.6)
    decode = replace(CONSUMER, transfer_s=4.0, exposed_transfer_s=3.0, statuses=statuses)
    expected = "transfer exposed for 3.00 s: 12.0 MB from prefill-0 to decode-0 at 3.0 MB/s"
    assert cause(replace(HANDOFF, decode=decode), duration_s=8.8) == expected


def test_a_full_batch_is_named_after_the_transfer() -> None:
    statuses = later(*CONSUMER.statuses, from_s=2.0, by_s=3.0)
    expected = "waited 3.10 s for the batch of decode-0: its KV was there, and the batch was full"
    assert cause(replace(HANDOFF, decode=replace(CONSUMER, statuses=statuses)), duration_s=9.2) == expected


def test_preemptions_are_counted_and_summed_up() -> None:
    attempt = replace(HANDOFF, decode=preempted(CONSUMER, (2.5, 3.5), (4.0, 5.0)))
    assert cause(attempt) == "decode-0 had no free blocks: preempted twice, for 2.00 s in all"


def test_a_lost_decode_engine_is_named_with_the_token_from_which_another_one_went_on() -> None:
    lost = replace(HANDOFF, decode=None, failure="engine decode-0 is lost: no message", ended_s=3.0)
    again = replace(ALONE, began_s=3.5, first_token_s=5.0)
    expected = "engine decode-0 is lost: no message; resumed from token 30 on both-0, which cost 2.00 s"
    assert cause(lost, again, duration_s=6.5) == expected


def test_a_loss_that_cost_little_beside_a_long_answer_is_named_behind_the_work() -> None:
    lost = replace(HANDOFF, decode=None, failure="engine decode-0 is lost", ended_s=3.0)
    again = replace(ALONE, began_s=3.0, first_token_s=3.2, decode=replace(_report(ALONE), queued_s=0.1, statuses=()))
    text = cause(lost, again, duration_s=60.0, itl_max_s=0.3)
    assert text.startswith("no long wait: both-0 generated 30 tokens for ")
    assert text.endswith("; on the way, engine decode-0 is lost")


def test_an_engine_that_was_lost_before_the_first_token_costs_its_whole_attempt() -> None:
    lost = replace(ALONE, decode=None, num_new_tokens=0, first_token_s=None, failure="lost", ended_s=2.0)
    again = replace(ALONE, began_s=2.0, first_token_s=3.5)
    assert cause(lost, again, ttft_s=3.5) == "lost; began again on both-0, which cost 3.50 s"


def test_a_lost_prefill_engine_is_named_with_the_engine_that_computed_the_prompt() -> None:
    attempt = replace(
        HANDOFF, prefill=None, prefill_failure="prefill-0 is lost", first_token_s=4.0, decode=replace(CONSUMER)
    )
    expected = "prefill-0 is lost: decode-0 computed the prompt itself, and the first token came 3.90 s after"
    assert cause(attempt, ttft_s=4.0).startswith(expected)


def test_an_attempt_that_nothing_followed_says_so() -> None:
    lost = replace(ALONE, decode=None, num_new_tokens=0, first_token_s=None, failure="it broke", ended_s=2.0)
    assert cause(lost, outcome="failed", duration_s=2.0) == "it broke; no other engine continued it"


def test_a_move_is_named_by_the_gap_that_it_left() -> None:
    attempt = replace(HANDOFF, decode_engine_ids=("decode-0", "decode-1"), decode=None, moved_s=(4.0,))
    expected = "decode-0 had no free blocks: migrated from decode-0 to decode-1, with 2.00 s between two tokens"
    assert cause(attempt, itl_max_s=2.0) == expected


def test_a_client_that_reads_slowly_is_told_from_an_engine_that_is_slow() -> None:
    expected = "the client took 13.90 s to read on after the last token was generated"
    assert cause(duration_s=20.0) == expected


def test_a_busy_ingress_is_named() -> None:
    attempt = replace(ALONE, began_s=3.0, first_token_s=4.5)
    assert cause(attempt, ttft_s=4.5).startswith("spent 3.00 s at the ingress before an engine got it")


@pytest.mark.parametrize(
    ("queued_s", "ttft_s", "is_named"),
    [
        pytest.param(0.5, 0.8, True, id="most of the time to the first token"),
        pytest.param(0.5, 2.0, False, id="a small part of it"),
        pytest.param(0.05, 0.06, False, id="a short time"),
    ],
)
def test_a_wait_that_is_short_beside_a_long_answer_counts_if_it_delayed_the_first_token(
    queued_s: float, ttft_s: float, is_named: bool
) -> None:
    attempt = replace(ALONE, decode=replace(_report(ALONE), queued_s=queued_s, prefill_s=0.3, statuses=()))
    assert ("queue of both-0" in cause(attempt, ttft_s=ttft_s, duration_s=60.0)) == is_named


def test_a_request_in_flight_says_who_has_it() -> None:
    attempt = AttemptRecord(0.1, ("decode-0",), "prefill-0")
    text = make_story(ended(attempt, outcome=None, duration_s=None, in_flight_s=2.1, ttft_s=None)).cause
    assert text == "prefill-0 has had it for 2.00 s of 2.10 s; engines report at their end what they did"


def waiting(*queues: EngineQueue, attempt: AttemptRecord | None = None) -> str:
    """The cause of a request in flight for 2.1 s, whose engines have these queues."""
    begun = attempt or AttemptRecord(0.1, ("decode-0",), "prefill-0")
    record = ended(begun, outcome=None, duration_s=None, in_flight_s=2.1, ttft_s=begun.first_token_s, queues=queues)
    return make_story(record).cause


def test_a_request_that_waits_for_decode_blocks_says_so_before_any_engine_reports_on_it() -> None:
    producer = EngineQueue("prefill-0", num_waiting=3, num_waiting_for_reservation=3)
    consumer = EngineQueue("decode-0", num_running=8, num_waiting=3, kv_cache_usage=0.976)
    expected = "has waited 2.00 s until decode-0 reserves blocks: decode-0 has 8 running and 3 waiting, and 98% of its"
    assert waiting(producer, consumer) == f"{expected} KV cache in use"


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        pytest.param(
            EngineQueue("prefill-0", 1, 4, num_waiting_for_reservation=3),
            EngineQueue("decode-0", num_running=8, num_waiting=3, kv_cache_usage=0.98),
            "prefill-0 has 1 running and 4 waiting, 3 of them for blocks of decode engines, and 0% of its KV cache in "
            "use; decode-0 has 8 running and 3 waiting, and 98% of its KV cache in use",
            id="others are computed meanwhile",
        ),
        pytest.param(
            EngineQueue("prefill-0", 2, 9, kv_cache_usage=0.5),
            EngineQueue("decode-0", 1, 3, num_waiting_for_kv=2, num_waiting_for_batch=3),
            "prefill-0 has 2 running and 9 waiting, and 50% of its KV cache in use; decode-0 has 1 running and 3 "
            "waiting, 3 of them with their KV, for the batch, the KV of 2 is on its way, and 0% of its KV cache in use",
            id="a queue for prefill",
        ),
    ],
)
def test_where_it_is_not_certain_what_a_request_waits_for_the_queues_are_told(
    producer: EngineQueue, consumer: EngineQueue, expected: str
) -> None:
    begin = "prefill-0 has had it for 2.00 s of 2.10 s; engines report at their end what they did. Now "
    assert waiting(producer, consumer) == begin + expected


def test_a_request_whose_client_left_before_its_engines_reported_says_who_had_it() -> None:
    attempt = AttemptRecord(0.1, ("decode-0",), "prefill-0")
    text = make_story(ended(attempt, outcome="cancelled", duration_s=2.1, ttft_s=None)).cause
    assert text == (
        "prefill-0 had it for 2.00 s of 2.10 s, and did not report what it did until it was lost or told to abort"
    )


def test_a_request_that_its_first_token_ended_names_what_the_prefill_engine_did() -> None:
    attempt = replace(HANDOFF, decode=None, num_new_tokens=1)
    expected = "no long wait: prefill-0 computed the prompt of 100 tokens for 1.00 s of 1.61 s"
    only = {"duration_s": 1.61, "num_output_tokens": 1, "itl_p50_s": None, "itl_max_s": None}
    queued = replace(PRODUCER, queued_s=0.2, prefill_s=1.3)
    assert cause(replace(attempt, prefill=queued), **only) == expected.replace("1.00", "1.30")
    waited = cause(replace(attempt, prefill=replace(PRODUCER, queued_s=1.3, prefill_s=0.2)), **only)
    assert waited == (
        "waited 1.30 s in the queue of prefill-0, where 200.0 ms were predicted: other requests came first, or "
        "decode-0 reserved blocks late, which it has not reported"
    )


def test_a_request_whose_client_left_before_its_kv_had_come_names_the_decode_engine() -> None:
    attempt = replace(HANDOFF, decode=None, num_new_tokens=1)
    text = cause(attempt, outcome="cancelled", num_output_tokens=1, itl_p50_s=None, itl_max_s=None)
    assert text.startswith("decode-0 had it for 4.60 s of 6.20 s, and did not report")


def test_a_request_that_no_engine_got_was_at_the_ingress() -> None:
    record = RequestRecord("r", "", "i", 1000.0, outcome="overloaded", duration_s=0.2)
    assert make_story(record).cause == "no engine has had it: it spent 200.0 ms at the ingress"
