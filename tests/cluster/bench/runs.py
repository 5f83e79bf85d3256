"""Results of loads that never took place, for tests of figures."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.load import LoadResult
from cluster.bench.record import Records, RequestRecord


def record(index: int, *times_s: float, num_tokens: int | None = None, error: str | None = None) -> RequestRecord:
    """A request of 8 and 3 tokens that was due and sent at 100, with events at these times after it."""
    made = RequestRecord(PlannedRequest(index, 0.0, 8, 3), arrival_s=100.0, due_s=100.0, sent_s=100.0)
    for time_s in times_s:
        made.note_event(100.0 + time_s)
    made.num_output_tokens = num_tokens
    made.error, made.detail = error, "" if error is None else f"said of {index}"
    return made


def load_result(records: Sequence[RequestRecord], duration_s: float = 4.0, lag_s: Sequence[float] = ()) -> LoadResult:
    """A run of these requests."""
    kept = Records(seed=0)
    for one in records:
        kept.add(one)
    return LoadResult(kept, duration_s, len(records), array("d", lag_s), cpu_s=0.5)
