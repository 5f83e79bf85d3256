"""A story has the phases of a request on one axis, in whatever way its engines ended.

Tests of cluster/observability/stories/attempt_spans.py, cluster/observability/stories/request_story.py.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import EventKind, RequestStory
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord, StatusAt
from tests.cluster.observability.stories.story_samples import ALONE, CONSUMER, HANDOFF, PRODUCER, ended, preempted

replace = msgspec.structs.replace


def phases(story: RequestStory) -> list[tuple[str, str, float, float | None]]:
    return [
        (span.phase.value, span.engine_id, round(span.began_s, 3), span.ended_s and round(span.ended_s, 3))
        for span in story.spans
    ]


def test_a_handoff_has_the_phases_of_both_engines() -> None:
    story = make_story(ended())
    assert phases(story) == [
        ("admission", "", 0.0, 0.1),
        ("queue", "prefill-0", 0.1, 0.6),
        ("reservation", "decode-0", 0.1, 0.3),
        ("prefill", "prefill-0", 0.6, 1.6),
        ("transfer_hidden", "decode-0", 1.0, 1.6),
        ("transfer_exposed", "decode-0", 1.6, 2.0),
        ("batch", "decode-0", 2.0, 2.1),
        ("decode", "decode-0", 2.1, 6.1),
    ]
    assert [(event.kind, event.at_s) for event in story.events] == [(EventKind.FIRST_TOKEN, 1.6)]
    assert story.engine_ids == ["prefill-0", "decode-0"]


def test_a_story_sums_up_its_request() -> None:
    story = make_story(ended())
    assert (story.request_id, story.tenant, story.model, story.ingress) == ("r", "alice", "tiny", "ingress-0")
    assert story.arrived_at_ns == 1_000_000_000_000
    assert (story.num_attempts, story.num_moves, story.num_preemptions, story.num_cached_tokens) == (1, 0, 0, 10)
    assert (story.num_transferred_bytes, story.transfer_s, story.exposed_transfer_s) == (12_000_000, 1.0, 0.4)
    assert (story.outcome, story.error, story.duration_s, story.way) == ("length", "", 6.2, "prefill_decode")
    assert json.loads(story.to_json())["spans"][0]["phase"] == "admission"


def test_one_engine_that_does_all_has_no_transfer() -> None:
    story = make_story(ended(ALONE, duration_s=3.0, ttft_s=1.5))
    assert phases(story) == [
        ("queue", "both-0", 0.0, 0.5),
        ("prefill", "both-0", 0.5, 1.5),
        ("decode", "both-0", 1.5, 3.0),
    ]


def test_a_preempted_request_waits_between_two_times_in_the_batch() -> None:
    attempt = replace(HANDOFF, decode=preempted(CONSUMER, (3.0, 3.5), (4.0, 5.0)))
    story = make_story(ended(attempt))
    assert phases(story)[-5:] == [
        ("decode", "decode-0", 2.1, 3.1),
        ("preempted", "decode-0", 3.1, 3.6),
        ("decode", "decode-0", 3.6, 4.1),
        ("preempted", "decode-0", 4.1, 5.1),
        ("decode", "decode-0", 5.1, 6.1),
    ]
    assert [(event.kind.value, round(event.at_s, 3)) for event in story.events] == [
        ("first_token", 1.6),
        ("preempted", 3.1),
        ("preempted", 4.1),
    ]
    assert story.num_preemptions == 2


def test_a_lost_engine_leaves_what_tokens_show_and_the_next_attempt_follows() -> None:
    lost = replace(HANDOFF, decode=None, failure="engine decode-0 is lost", ended_s=3.0)
    again = replace(ALONE, began_s=3.5, first_token_s=5.0)
    story = make_story(ended(lost, again, duration_s=6.5))
    assert phases(story) == [
        ("admission", "", 0.0, 0.1),
        ("queue", "prefill-0", 0.1, 0.6),
        ("prefill", "prefill-0", 0.6, 1.6),
        ("decode", "decode-0", 1.6, 3.0),
        ("recovery", "", 3.0, 3.5),
        ("queue", "both-0", 3.5, 4.0),
        ("prefill", "both-0", 4.0, 5.0),
        ("decode", "both-0", 5.0, 6.5),
    ]
    assert [(event.kind.value, event.at_s, event.text) for event in story.events][-1] == (
        "failed",
        3.0,
        "engine decode-0 is lost",
    )
    assert (story.num_attempts, [span.attempt for span in story.spans]) == (2, [0, 1, 1, 1, 1, 2, 2, 2])


def test_a_decode_engine_that_computes_the_prompt_itself_shows_a_prefill() -> None:
    alone = EngineTimes(
        0.2,
        2.8,
        num_prompt_tokens_computed=100,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.2),
            StatusAt("WAITING", 1.0),
            StatusAt("RUNNING", 1.0),
            StatusAt("FINISHED_STOPPED", 6.0),
        ),
    )
    attempt = replace(HANDOFF, prefill=None, decode=alone, prefill_failure="prefill-0 is lost", first_token_s=3.1)
    story = make_story(ended(attempt, ttft_s=3.1))
    assert [(event.kind.value, event.at_s) for event in story.events] == [("failed", 1.1), ("first_token", 3.1)]
    assert phases(story) == [
        ("admission", "", 0.0, 0.1),
        ("unreported", "prefill-0", 0.1, 1.1),
        ("reservation", "decode-0", 0.1, 0.3),
        ("unreported", "decode-0", 0.3, 1.1),
        ("prefill", "decode-0", 1.1, 3.1),
        ("decode", "decode-0", 3.1, 6.1),
    ]


def test_a_moved_request_decodes_at_one_engine_after_the_other() -> None:
    successor = EngineTimes(
        0.1,
        0.4,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.1),
            StatusAt("WAITING", 0.3),
            StatusAt("RUNNING", 0.4),
            StatusAt("FINISHED_STOPPED", 2.5),
        ),
    )
    attempt = replace(HANDOFF, decode_engine_ids=("decode-0", "decode-1"), decode=successor, moved_s=(4.0,))
    story = make_story(ended(attempt))
    assert phases(story)[3:] == [
        ("decode", "decode-0", 1.6, 4.0),
        ("queue", "decode-1", 3.5, 3.6),
        ("transfer_exposed", "decode-1", 3.6, 3.9),
        ("prefill", "decode-1", 3.9, 4.0),
        ("decode", "decode-1", 4.0, 6.0),
    ]
    assert (story.num_moves, story.events[-1].text) == (1, "migrated from decode-0 to decode-1")


def live(attempt: AttemptRecord, in_flight_s: float, **given: object) -> RequestRecord:
    return ended(attempt, outcome=None, duration_s=None, in_flight_s=in_flight_s, **given)


def test_a_request_in_flight_shows_who_has_it_until_engines_report() -> None:
    begun = AttemptRecord(0.1, ("decode-0",), "prefill-0")
    waiting = make_story(live(begun, 0.9, ttft_s=None))
    assert phases(waiting) == [
        ("admission", "", 0.0, 0.1),
        ("unreported", "prefill-0", 0.1, None),
        ("unreported", "decode-0", 0.1, None),
    ]
    assert (waiting.outcome, waiting.duration_s) == (None, 0.9)
    handed_over = replace(begun, prefill=PRODUCER, first_token_s=1.6, num_new_tokens=1)
    assert phases(make_story(live(handed_over, 1.7))) == [
        ("admission", "", 0.0, 0.1),
        ("queue", "prefill-0", 0.1, 0.6),
        ("prefill", "prefill-0", 0.6, 1.6),
        ("unreported", "decode-0", 1.6, None),
    ]
    decoding = replace(handed_over, num_new_tokens=2)
    assert phases(make_story(live(decoding, 2.0)))[-1] == ("decode", "decode-0", 1.6, None)


def test_a_request_that_waits_for_any_engine_is_in_recovery() -> None:
    lost = replace(ALONE, decode=None, num_new_tokens=0, first_token_s=None, failure="lost", ended_s=1.0)
    assert phases(make_story(live(lost, 2.0, ttft_s=None)))[-1] == ("recovery", "", 1.0, None)


def test_a_request_without_attempts_has_been_at_the_ingress_only() -> None:
    record = RequestRecord("r", "", "i", 1000.0, outcome="overloaded", duration_s=0.2)
    assert phases(make_story(record)) == [("admission", "", 0.0, 0.2)]


@pytest.mark.parametrize("record", [RequestRecord("r", "", "i", 0.0), RequestRecord("r", "", "i", 0.0, duration_s=0.0)])
def test_a_record_of_nothing_has_a_story_and_a_cause(record: RequestRecord) -> None:
    assert make_story(record).cause


_TIMES = st.floats(0, 10) | st.sampled_from([0.0, 1e-9, 1e4])
_STATUSES = st.lists(
    st.builds(
        StatusAt,
        st.sampled_from(["WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED", "FINISHED_STOPPED", "NEW"]),
        _TIMES,
    ),
    max_size=8,
).map(tuple)
_REPORTS = st.none() | st.builds(
    EngineTimes,
    _TIMES,
    _TIMES,
    st.integers(0, 5),
    transfer_s=_TIMES,
    exposed_transfer_s=_TIMES,
    num_transferred_bytes=st.integers(0, 10**9),
    statuses=_STATUSES,
)
_ATTEMPTS = st.builds(
    AttemptRecord,
    _TIMES,
    st.sampled_from([("decode-0",), ("decode-0", "decode-1")]),
    st.sampled_from([None, "prefill-0"]),
    num_new_tokens=st.integers(0, 3),
    failure=st.sampled_from(["", "lost"]),
    prefill=_REPORTS,
    decode=_REPORTS,
    first_token_s=st.none() | _TIMES,
    moved_s=st.lists(_TIMES, max_size=1).map(tuple),
    ended_s=st.none() | _TIMES,
)


@settings(max_examples=50)
@given(st.lists(_ATTEMPTS, max_size=3), st.none() | _TIMES, _TIMES)
def test_whatever_engines_report_no_phase_is_empty_or_outside_of_its_request(
    attempts: list[AttemptRecord], duration_s: float | None, now_s: float
) -> None:
    record = RequestRecord(
        "r", "", "i", 0.0, attempts=tuple(attempts), duration_s=duration_s, in_flight_s=None if duration_s else now_s
    )
    story = make_story(record)
    assert story.cause
    for span in story.spans:
        assert span.ended_s is None or 0 <= span.began_s < span.ended_s
        assert span.ended_s is not None or duration_s is None
    json.loads(story.to_json())


LEFT = replace(HANDOFF, prefill=None, decode=None, num_new_tokens=0, first_token_s=None, ended_s=2.0)
WENT_ON = replace(ALONE, began_s=2.0, decode_engine_ids=("decode-0",), first_token_s=3.5)


def test_a_rerouted_request_has_waited_in_the_queue_that_it_has_left() -> None:
    story = make_story(ended(LEFT, WENT_ON, duration_s=5.0, ttft_s=3.5))
    assert phases(story) == [
        ("admission", "", 0.0, 0.1),
        ("queue", "prefill-0", 0.1, 2.0),
        ("queue", "decode-0", 2.0, 2.5),
        ("prefill", "decode-0", 2.5, 3.5),
        ("decode", "decode-0", 3.5, 5.0),
    ]
    (event, _) = story.events
    assert (event.kind, event.at_s, event.engine_id, event.attempt) == (EventKind.REROUTED, 2.0, "prefill-0", 1)
    assert event.text == "rerouted from the queue of prefill-0 to decode-0, which had run out of prompts"
    assert (story.num_attempts, story.error) == (2, "")
    waited = "waited 2.40 s in the queue of prefill-0 and of decode-0, where 200.0 ms were predicted"
    assert story.cause == f"{waited}: other requests came first"
