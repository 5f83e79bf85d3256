"""The stopwatch measures the times between tokens in bounded memory."""

from __future__ import annotations

import pytest

from cluster.observability.metrics import ServingMetrics
from cluster.observability.stopwatch import Stopwatch


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(gaps_s: list[float], num_tokens: int = 1) -> Stopwatch:
    clock = Clock()
    one = Stopwatch(clock, ServingMetrics())
    one.count(1)
    for gap_s in gaps_s:
        clock.now_s += gap_s
        one.count(num_tokens)
    return one


def test_median_and_longest_time_between_tokens() -> None:
    one = measured([1.0, 9.0, 2.0])
    assert (one.itl_p50_s, one.itl_max_s) == (2.0, 9.0)


def test_tokens_that_come_together_share_their_time() -> None:
    assert measured([4.0], num_tokens=4).itl_p50_s == 1.0


def test_one_token_has_no_time_between_tokens() -> None:
    one = measured([])
    assert (one.itl_p50_s, one.itl_max_s) == (None, None)


def test_the_median_of_very_many_tokens_comes_from_an_evenly_spaced_sample() -> None:
    one = measured([float(number) for number in range(1, 10_001)])
    assert one.itl_p50_s == pytest.approx(5000, rel=0.05)
    assert one.itl_max_s == 10_000


def test_outcome_and_duration_are_known_at_the_end() -> None:
    clock = Clock()
    one = Stopwatch(clock, ServingMetrics())
    with pytest.raises(ValueError, match="a bug"), one.counting_the_end():  # noqa: PT012  # it is the context that counts
        clock.now_s = 3.0
        assert (one.outcome, one.duration_s) == (None, None)
        raise ValueError("a bug")
    assert (one.outcome, one.duration_s) == ("internal", 3.0)
