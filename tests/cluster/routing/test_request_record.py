"""Records survive being written and read, and put measured times beside predicted ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.decision import Decision, Reason, RouteTerms, RoutingMode, Way
from cluster.routing.request_record import (
    AttemptRecord,
    Comparison,
    EngineTimes,
    RequestRecord,
    comparisons,
)
from tests.cluster.routing.record_samples import attempt, decision, record

TIMES = st.floats(min_value=0, max_value=1e9)
COUNTS = st.integers(min_value=0, max_value=2**53)
NAMES = st.text(max_size=20)
BY_TYPE: dict[object, st.SearchStrategy[Any]] = {float: TIMES, int: COUNTS, str: NAMES}


def structs(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a struct: those of its fields that are not given have any value of their type."""
    known = {field.name: BY_TYPE[field.type] for field in msgspec.structs.fields(kind) if field.type in BY_TYPE}
    return st.builds(kind, **(known | fields))


ENGINE_TIMES = st.none() | structs(EngineTimes)
TERMS = structs(RouteTerms, way=st.sampled_from(Way), prefill_engine_id=st.none() | NAMES)
DECISIONS = structs(
    Decision,
    mode=st.sampled_from(RoutingMode),
    reason=st.sampled_from(Reason),
    chosen=st.none() | TERMS,
    others=st.lists(TERMS, max_size=3).map(tuple),
    runner_up=st.none() | TERMS,
)
ATTEMPTS = structs(
    AttemptRecord,
    decode_engine_ids=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    prefill_engine_id=st.none() | NAMES,
    decision=st.none() | DECISIONS,
    prefill=ENGINE_TIMES,
    decode=ENGINE_TIMES,
)
RECORDS = structs(
    RequestRecord,
    outcome=st.none() | NAMES,
    attempts=st.lists(ATTEMPTS, max_size=3).map(tuple),
    ttft_s=st.none() | TIMES,
    itl_p50_s=st.none() | TIMES,
    itl_max_s=st.none() | TIMES,
    duration_s=st.none() | TIMES,
    schema=st.just(1),
)


@given(RECORDS)
def test_a_record_is_the_same_after_json_and_after_bytes(one: RequestRecord) -> None:
    assert RequestRecord.from_json(one.to_json()) == one
    assert RequestRecord.from_bytes(one.to_bytes()) == one


def test_a_record_of_another_schema_is_refused_with_what_to_do() -> None:
    later = msgspec.structs.replace(record(), schema=2)
    with pytest.raises(ValueError, match="schema 2, and this raypd reads 1: read it with the version"):
        RequestRecord.from_json(later.to_json())


def test_a_broken_record_is_refused_by_the_field_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"Expected `float`, got `str` - at `\$.arrived_at_s`"):
        RequestRecord.from_json(record().to_json().replace(b"1000.0", b'"now"'))


def test_measured_times_stand_beside_the_predicted_ones() -> None:
    one = record(attempt(began_s=0.25))
    assert comparisons(one, one.attempts[0]) == [
        Comparison("queue", 0.2, 0.3),
        Comparison("prefill", 0.4, 0.8),
        Comparison("exposed transfer", 0.01, 0.02),
        Comparison("time to first token", 0.75, 1.0),
        Comparison("time between tokens", 0.02, 0.03),
    ]
    assert Comparison("prefill", 0.4, 0.8).error == pytest.approx(1.0)
    assert Comparison("prefill", 0.4, None).error is Comparison("prefill", 0.0, 1.0).error is None


def test_what_a_client_sees_is_compared_only_if_one_attempt_gave_it() -> None:
    one = record(attempt(failure="it died"), attempt(began_s=0.5))
    assert [which.measured_s for which in comparisons(one, one.attempts[1])] == [0.3, 0.8, 0.02, None, None]


def test_what_a_client_sees_is_that_of_the_attempt_that_a_rerouted_request_went_on_with() -> None:
    left, went_on = msgspec.structs.replace(attempt(), ended_s=2.0), attempt(2.0)
    one = record(left, went_on)
    assert (left.was_left, went_on.was_left, attempt(failure="lost").was_left) == (True, False, False)
    assert one.left_queues_s == 2.0
    assert {found.what: found.measured_s for found in comparisons(one, went_on)}["time to first token"] == one.ttft_s
    assert {found.what: found.predicted_s for found in comparisons(one, went_on)}["time to first token"] == 2.5
    assert {found.what: found.measured_s for found in comparisons(one, left)}["time to first token"] is None


def test_an_attempt_without_costs_has_nothing_to_compare() -> None:
    one = record(attempt(why=decision(chosen=None)))
    assert comparisons(one, one.attempts[0]) == []


def test_an_engine_that_sent_no_report_leaves_its_times_open() -> None:
    one = record(msgspec.structs.replace(attempt(), prefill=None))
    assert [which.measured_s for which in comparisons(one, one.attempts[0])] == [None, None, 0.02, 1.0, 0.03]


def test_the_engine_that_computed_the_prompt_is_not_known_after_a_migration() -> None:
    alone = msgspec.structs.replace(attempt(), prefill_engine_id=None, prefill=None)
    assert alone.computing == alone.decode
    assert msgspec.structs.replace(alone, decode_engine_ids=("decode-0", "decode-1")).computing is None


def test_the_first_token_was_predicted_by_the_attempt_that_gave_it() -> None:
    assert record(attempt(began_s=0.25)).predicted_ttft_s == 0.75
    without_tokens = msgspec.structs.replace(attempt(), num_new_tokens=0)
    assert record(without_tokens, attempt()).predicted_ttft_s is None
