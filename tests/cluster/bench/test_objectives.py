from __future__ import annotations

import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.objectives import meets, num_good, parse_objectives
from cluster.bench.record import RequestRecord
from cluster.errors import InvalidConfig


def test_both_ways_of_writing_objectives_are_read() -> None:
    expected = {"ttft": 0.5, "itl": 0.05, "e2el": 2.0}
    assert parse_objectives(["ttft=500ms,itl=50ms", "e2e=2s"]) == pytest.approx(expected)
    assert parse_objectives(["ttft:500 itl:50", "e2el:2000"]) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=fast", "ttft=-1ms", "latency=3", "ttft=5h", "=5"])
def test_an_objective_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is not ttft, tpot, itl or e2el with a time"):
        parse_objectives([text])


def test_an_objective_is_given_once() -> None:
    with pytest.raises(InvalidConfig, match="e2el is given twice"):
        parse_objectives(["e2e=1s,e2el=2s"])


def _record(*times_s: float) -> RequestRecord:
    record = RequestRecord(PlannedRequest(0, 0.0, 8, 4), arrival_s=0.0)
    for time_s in times_s:
        record.note_event(time_s)
    return record


@pytest.mark.parametrize(
    ("objectives", "is_good"),
    [
        ({"ttft": 1.0}, True),
        ({"ttft": 0.99}, False),
        ({"tpot": 1.0}, True),
        ({"tpot": 0.99}, False),
        ({"itl": 1.5}, True),
        ({"itl": 1.49}, False),
        ({"e2el": 3.0}, True),
        ({"e2el": 2.99}, False),
        ({"ttft": 1.0, "e2el": 2.0}, False),
        ({}, True),
    ],
)
def test_a_request_is_good_if_it_meets_every_objective(objectives: dict[str, float], is_good: bool) -> None:
    assert meets(_record(1.0, 1.5, 3.0), objectives) is is_good


def test_a_single_token_meets_every_tpot() -> None:
    assert meets(_record(1.0), {"tpot": 0.001})


def test_failed_requests_are_not_good() -> None:
    failed = _record(1.0)
    failed.error = "cut off"
    assert num_good([failed, _record(1.0), _record(2.0)], {"ttft": 1.5}) == 1
