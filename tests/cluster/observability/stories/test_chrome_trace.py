"""A trace opens in Perfetto: events nest, arrows begin and end in events of threads, and all numbers have names."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import msgspec

from cluster.observability.stories.chrome_trace import chrome_trace
from cluster.observability.stories.make_story import make_story
from cluster.routing.request_record import RequestRecord
from tests.cluster.observability.stories.story_samples import ALONE, CONSUMER, HANDOFF, ended, preempted

replace = msgspec.structs.replace


def events(*records: RequestRecord) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(chrome_trace([make_story(record) for record in records]))["traceEvents"]
    return found


def check(found: list[dict[str, Any]]) -> None:
    """Check what Perfetto drops silently: events that do not nest, and arrows outside of events."""
    named = {one["pid"] for one in found if one["name"] == "process_name"}
    assert {one["pid"] for one in found} == named
    open_events: dict[tuple[int, str], list[tuple[str, float]]] = defaultdict(list)
    for one in found:
        key = one["pid"], one.get("id", "")
        if one["ph"] == "b":
            assert not open_events[key] or one["ts"] >= open_events[key][-1][1]
            open_events[key].append((one["name"], one["ts"]))
        elif one["ph"] == "e":
            name, began_us = open_events[key].pop()
            assert name == one["name"]
            assert began_us <= one["ts"]
    assert not any(open_events.values())
    lanes = defaultdict(list)
    for one in found:
        if one["ph"] == "X":
            lanes[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for lane in lanes.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(lane))
    for one in found:
        if one["ph"] in "sf":
            assert any(began <= one["ts"] <= end for began, end in lanes[one["pid"], one["tid"]])
    arrows = [[one["id"] for one in found if one["ph"] == end] for end in "sf"]
    assert arrows[0] == arrows[1]


def test_a_handoff_is_an_arrow_between_two_processes() -> None:
    found = events(ended())
    check(found)
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "ingress-0", "prefill-0"]
    transfers = [(names[one["pid"]], one["ts"], one["dur"]) for one in found if one["ph"] == "X"]
    assert transfers == [("prefill-0", 1e6, 1e6), ("decode-0", 1e6, 1e6)]
    assert [names[one["pid"]] for one in found if one["ph"] in "sf"] == ["prefill-0", "decode-0"]
    phases = [(names[one["pid"]], one["name"], one["ts"]) for one in found if one["ph"] == "b"]
    assert phases == [
        ("ingress-0", "r", 0.0),
        ("ingress-0", "admission", 0.0),
        ("prefill-0", "queue", 0.1e6),
        ("decode-0", "reservation", 0.1e6),
        ("prefill-0", "prefill", 0.6e6),
        ("decode-0", "transfer_exposed", 1.6e6),
        ("decode-0", "batch", 2e6),
        ("decode-0", "decode", 2.1e6),
    ]


def test_transfers_that_overlap_are_in_different_threads() -> None:
    later = [replace(ended(), request_id=f"r-{n}", arrived_at_s=1000.0 + n * 0.4) for n in range(4)]
    found = events(*later)
    check(found)
    assert sorted({one["tid"] for one in found if one["ph"] == "X"}) == [1, 2, 3]


def test_failures_preemptions_and_live_requests_fit_in() -> None:
    lost = replace(HANDOFF, decode=None, failure="engine decode-0 is lost", ended_s=3.0)
    found = events(
        ended(lost, replace(ALONE, began_s=3.5, first_token_s=5.0), duration_s=6.5),
        ended(replace(HANDOFF, decode=preempted(CONSUMER, (3.0, 3.5)))),
        ended(replace(HANDOFF, prefill=None, decode=None), outcome=None, duration_s=None, in_flight_s=2.0),
        RequestRecord("refused", "", "ingress-1", 1000.0, outcome="overloaded", duration_s=0.2),
    )
    check(found)
    assert {"failed", "preempted", "first_token"} <= {one["name"] for one in found if one["ph"] == "n"}


def test_a_trace_of_no_request_is_empty() -> None:
    assert events() == []
