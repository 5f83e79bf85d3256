from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest

from cluster.bench.arrivals import arrival_times
from cluster.simulation.workloads.drawn_requests import LengthDistribution, draw_requests
from cluster.simulation.workloads.workload_request import WorkloadRequest

FIXED = LengthDistribution(100)


def test_without_variation_all_lengths_are_the_mean() -> None:
    arrivals_s = arrival_times(3, 2.0, burstiness=float("inf"), seed=0)
    assert list(draw_requests(arrivals_s, FIXED, LengthDistribution(7), seed=1)) == [
        WorkloadRequest("0", 0.5, 100, 7),
        WorkloadRequest("1", 1.0, 100, 7),
        WorkloadRequest("2", 1.5, 100, 7),
    ]


def test_drawn_lengths_have_the_mean_and_the_variation_asked_for() -> None:
    lengths = LengthDistribution(1000, cv=1.5).draw(np.random.default_rng(3), 200_000)
    assert np.mean(lengths) == pytest.approx(1000, rel=0.03)
    assert np.std(lengths) == pytest.approx(1500, rel=0.1)


def test_lengths_are_cut_off_at_both_ends() -> None:
    lengths = LengthDistribution(100, cv=3.0, low=50, high=200).draw(np.random.default_rng(3), 1000)
    assert (lengths.min(), lengths.max()) == (50, 200)


def test_the_first_requests_do_not_depend_on_how_many_follow() -> None:
    varied = LengthDistribution(100, cv=1.0)
    few = list(draw_requests([0.0] * 3, varied, varied, seed=2))
    many = list(islice(draw_requests((float(index) for index in count()), varied, varied, seed=2), 10_000))
    assert [one.num_prompt_tokens for one in few] == [one.num_prompt_tokens for one in many[:3]]
    assert len({one.request_id for one in many}) == 10_000
    assert few != list(draw_requests([0.0] * 3, varied, varied, seed=3))


@pytest.mark.parametrize(
    "given",
    [
        {"mean": 0.5},
        {"mean": float("nan")},
        {"mean": 5, "cv": -1},
        {"mean": 5, "low": 0},
        {"mean": 5, "low": 9, "high": 8},
        {"mean": 5, "high": 10**9},
    ],
)
def test_impossible_lengths_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mean has to be at least 1"):
        LengthDistribution(**given)  # type: ignore[arg-type]  # the point
