from __future__ import annotations

import math
import random

import numpy as np
import pytest

from cluster.bench.estimates import NUM_RESAMPLES, Estimate, distribution_of, percentile


def test_percentiles_are_numpys() -> None:
    values = [4.0, 1.0, 2.0, 8.0]
    found = distribution_of([[value] for value in values], [25.0, 50.0, 99.0], seed=1)
    assert (found.num_values, found.mean.value) == (4, 3.75)
    assert found.std == pytest.approx(2.680951)
    assert {percent: one.value for percent, one in found.percentiles.items()} == pytest.approx(
        {25.0: 1.75, 50.0: 3.0, 99.0: 7.88}
    )
    assert percentile(values, 99) == pytest.approx(7.88)


def test_intervals_are_those_of_resampled_requests() -> None:
    """Held against the plain way: draw requests, join their values, and let numpy compute the figure."""
    rng = random.Random(5)
    requests = [[rng.expovariate(1 / (1 + index % 3)) for _ in range(rng.randrange(5))] for index in range(40)]
    found = distribution_of(requests, [50.0, 90.0], seed=7)
    draws = np.random.default_rng(7)
    plain: list[list[float]] = []
    while len(plain) < NUM_RESAMPLES:
        drawn = np.bincount(draws.integers(0, 40, 40), minlength=40)
        values = [value for times, one in zip(drawn, requests, strict=True) for value in one * int(times)]
        plain.append([float(np.mean(values)), *map(float, np.percentile(values, [50.0, 90.0]))])
    lows, highs = np.percentile(np.array(plain), [5.0, 95.0], axis=0)
    intervals = [found.mean, *found.percentiles.values()]
    assert [one.low for one in intervals] == pytest.approx(lows)
    assert [one.high for one in intervals] == pytest.approx(highs)


def test_gaps_of_one_request_count_as_one_draw() -> None:
    """Ten requests with a thousand equal gaps each say as much as ten values."""
    wide = distribution_of([[float(index)] * 1000 for index in range(10)], [50.0], seed=1)
    single = distribution_of([[float(index)] for index in range(10)], [50.0], seed=1)
    assert wide.mean.low == pytest.approx(single.mean.low)
    assert wide.mean.high == pytest.approx(single.mean.high)


def test_the_interval_of_a_mean_is_about_that_of_the_normal_distribution() -> None:
    rng = random.Random(1)
    values = [rng.gauss(10, 2) for _ in range(400)]
    mean = distribution_of([[value] for value in values], [50.0], seed=1).mean
    half = 1.6449 * float(np.std(values)) / math.sqrt(400)
    assert mean.low == pytest.approx(mean.value - half, abs=0.02)
    assert mean.high == pytest.approx(mean.value + half, abs=0.02)


def test_the_same_seed_gives_the_same_intervals() -> None:
    values = [[float(value**2)] for value in range(30)]
    assert distribution_of(values, [90.0], seed=3) == distribution_of(values, [90.0], seed=3)
    assert distribution_of(values, [90.0], seed=3) != distribution_of(values, [90.0], seed=4)


def test_intervals_of_very_many_values_are_computed_on_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.bench.estimates.MAX_RESAMPLED", 100)
    rng = random.Random(2)
    values = [[rng.random() for _ in range(20)] for _ in range(50)]
    found = distribution_of(values, [50.0], seed=1)
    assert found.num_values == 1000
    assert found.percentiles[50.0].value == percentile([one for many in values for one in many], 50)
    assert found.percentiles[50.0].low < found.percentiles[50.0].value < found.percentiles[50.0].high


def test_nothing_has_no_figures() -> None:
    found = distribution_of([[], []], [50.0], seed=1)
    assert found.num_values == 0
    assert math.isnan(found.mean.value)
    assert math.isnan(found.percentiles[50.0].high)
    assert math.isnan(percentile([], 50))


def test_a_single_value_is_its_own_interval() -> None:
    assert distribution_of([[2.5]], [99.0], seed=1).percentiles == {99.0: Estimate(2.5, 2.5, 2.5)}


def test_percentiles_that_few_values_decide_are_told() -> None:
    found = distribution_of([[float(value)] for value in range(100)], [50.0, 95.0, 99.0], seed=1)
    assert [found.is_thin(percent) for percent in (50.0, 95.0, 99.0)] == [False, False, True]
