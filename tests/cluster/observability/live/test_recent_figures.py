from __future__ import annotations

import random

import pytest

from cluster.observability.live import recent_figures
from cluster.observability.live.recent_figures import RecentFigures, RecentRequests
from cluster.routing.request_record import RequestRecord


def _record(ended_s: float, outcome: str = "stop", ttft_s: float | None = 0.5) -> RequestRecord:
    return RequestRecord("r", "", "i", ended_s - 2.0, outcome, num_output_tokens=30, ttft_s=ttft_s, duration_s=2.0)


def test_figures_are_over_the_last_minute() -> None:
    recent = RecentRequests(now_s=1000.0)
    for ended_s, ttft_s in [(1000.0, 9.0), (1010.0, 1.0), (1060.0, 2.0), (1061.0, 3.0)]:
        recent.add(_record(ended_s, ttft_s=ttft_s))
    assert recent.figures(1065.0) == RecentFigures(60.0, 3, 3 / 60, 90 / 60, 0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("outcome", "num_failed"),
    [("stop", 0), ("length", 0), ("cancelled", 0), ("invalid", 0), ("failed", 1), ("deadline", 1), ("error", 1)],
)
def test_failures_are_those_of_the_cluster(outcome: str, num_failed: int) -> None:
    recent = RecentRequests(now_s=1000.0)
    recent.add(_record(1000.0, outcome))
    assert recent.figures(1000.0).num_failed == num_failed


def test_figures_of_many_requests_are_those_of_the_last_minute_alone() -> None:
    rng, recent = random.Random(5), RecentRequests(now_s=0.0)
    records: list[RequestRecord] = []
    for number in range(400):
        ttft_s = rng.choice((None, rng.random(), 0.5))
        record = _record(float(number), rng.choice(("stop", "failed")), ttft_s)
        recent.add(record)
        records.append(record)
        kept = records[max(0, number - 60) :]
        ttfts_s = sorted(one.ttft_s for one in kept if one.ttft_s is not None)
        assert recent.figures(float(number)) == RecentFigures(
            60.0,
            len(kept),
            len(kept) / 60,
            30 * len(kept) / 60,
            sum(one.outcome == "failed" for one in kept),
            ttfts_s[len(ttfts_s) // 2] if ttfts_s else None,
            ttfts_s[min(len(ttfts_s) - 1, len(ttfts_s) * 99 // 100)] if ttfts_s else None,
        )


def test_of_very_many_requests_the_newest_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_figures, "_MAX_REQUESTS", 3)
    recent = RecentRequests(now_s=0.0)
    for ttft_s in (9.0, 1.0, 2.0, 3.0):
        recent.add(_record(1.0, ttft_s=ttft_s))
    figures = recent.figures(1.0)
    assert (figures.num_requests, figures.ttft_p99_s) == (3, 3.0)


def test_without_requests_there_are_no_times() -> None:
    figures = RecentRequests(now_s=0.0).figures(1.0)
    assert (figures.num_requests, figures.requests_per_s, figures.ttft_p50_s) == (0, 0.0, None)
    recent = RecentRequests(now_s=0.0)
    recent.add(_record(1.0, "failed", None))
    assert recent.figures(1.0).ttft_p99_s is None
