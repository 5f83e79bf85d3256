from __future__ import annotations

import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.record import Records, RequestRecord


def _record(index: int, times_s: list[float], num_tokens: int | None = None) -> RequestRecord:
    record = RequestRecord(PlannedRequest(index, 1.0, 8, 4), arrival_s=101.0, due_s=102.0, sent_s=102.25)
    for time_s in times_s:
        record.note_event(time_s)
    record.num_output_tokens = num_tokens
    return record


def test_times_are_those_of_the_definitions() -> None:
    record = _record(0, [103.25, 103.5, 105.0])
    assert (record.ttft_s, record.e2e_s, record.tpot_s) == (1.0, 2.75, 0.875)
    assert record.gaps_s is not None
    assert (list(record.gaps_s), record.longest_gap_s) == ([0.25, 1.5], 1.5)
    assert (record.queue_s, record.lateness_s) == (1.0, 0.25)


def test_tokens_are_the_servers_count_where_events_have_several() -> None:
    record = _record(0, [103.25, 103.5, 105.0], num_tokens=8)
    assert (record.num_events, record.num_tokens, record.tpot_s) == (3, 8, 0.25)


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert _record(0, [103.25]).tpot_s is None


def test_an_answer_without_a_token_or_with_an_error_is_not_complete() -> None:
    assert not _record(0, []).is_complete
    failed = _record(0, [103.25])
    failed.error = "cut off"
    assert not failed.is_complete


def test_a_long_run_keeps_the_gaps_of_a_share_of_its_requests() -> None:
    records = Records(seed=1, max_gaps=100)
    for index in range(300):
        records.add(_record(index, [103.0, 103.5, 104.0]))
    kept = [record for record in records if record.gaps_s is not None]
    assert len(records) == 300
    assert records.kept_share == pytest.approx(1 / 8)
    assert sum(len(record.gaps_s or ()) for record in kept) <= 100
    assert 20 <= len(kept) <= 50, "the first requests are no likelier to be kept than the last ones"
    assert any(record.request.index < 150 for record in kept)
    assert any(record.request.index >= 150 for record in kept)
    assert all(record.longest_gap_s == 0.5 for record in records), "figures of requests stay"


def test_a_short_run_keeps_every_gap() -> None:
    records = Records(seed=1)
    records.add(_record(0, [103.0, 103.5]))
    assert [list(record.gaps_s or ()) for record in records] == [[0.5]]
    assert records.kept_share == 1.0
