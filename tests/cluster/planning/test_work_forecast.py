"""Forecasts, their choice, and their ranges."""

from __future__ import annotations

import random

import pytest

from cluster.planning.work_forecast import METHODS, Forecast, damped_holt, ewma, forecast, last_values


def test_a_constant_is_forecast_exactly() -> None:
    made = forecast([3.0] * 30, 3, 0.9)
    assert (made.value, made.low, made.high, made.error) == (3.0, 3.0, 3.0, 0.0)


def test_a_ramp_is_forecast_by_its_trend() -> None:
    ramp = [0.2 * i for i in range(40)]
    made = forecast(ramp, 4, 0.9)
    assert made.method == "holt"
    assert made.value > ramp[-1]
    mean_of_next = ramp[-1] + 0.5
    assert mean_of_next - 0.05 < made.high < mean_of_next + 0.5


def test_noise_around_a_mean_is_smoothed() -> None:
    draw = random.Random(1)
    made = forecast([10 + draw.gauss(0, 2) for _ in range(200)], 2, 0.9)
    assert made.method == "ewma"
    assert made.value == pytest.approx(10, abs=1.5)


def test_a_step_is_followed_by_the_last_value() -> None:
    assert forecast([1.0] * 10 + [5.0] * 10, 1, 0.9).method in {"last_value", "holt"}
    assert forecast([1.0] * 10 + [5.0] * 10, 1, 0.9).value == pytest.approx(5.0, abs=0.2)


def test_the_high_end_covers_as_many_of_the_outcomes_as_was_asked_for() -> None:
    draw = random.Random(7)
    series = [draw.expovariate(0.2) for _ in range(400)]
    covered = [series[at] <= forecast(series[:at], 1, 0.9).high for at in range(100, len(series))]
    assert sum(covered) / len(covered) == pytest.approx(0.9, abs=0.05)


def test_what_cannot_be_forecast_has_a_wide_range() -> None:
    draw = random.Random(3)
    bursts = forecast([100.0 if draw.random() < 0.1 else 1.0 for _ in range(120)], 1, 0.95)
    assert bursts.high > 3 * bursts.value
    assert bursts.error is not None
    assert bursts.error > 0.8


def test_few_values_give_a_wide_range_and_none_give_nothing() -> None:
    assert forecast([], 1, 0.9) == Forecast()
    made = forecast([4.0], 1, 0.9)
    assert (made.low, made.value, made.high, made.error) == (2.0, 4.0, 6.0, None)


def test_no_forecast_is_negative() -> None:
    made = forecast([float(max(20 - i, 0)) for i in range(21)], 10, 0.9)
    assert made.low >= 0.0
    assert made.value >= 0.0


@pytest.mark.parametrize("method", METHODS.values())
def test_a_method_uses_no_later_value_than_its_own(method: object) -> None:
    assert callable(method)
    series = [1.0, 4.0, 2.0, 8.0, 5.0]
    whole = method(series, 2)
    assert [method(series[: at + 1], 2)[-1] for at in range(len(series))] == pytest.approx(whole)


def test_the_methods_are_what_their_names_say() -> None:
    assert last_values([1.0, 2.0], 1) == [1.0, 2.0]
    assert ewma([1.0, 2.0], 1) == pytest.approx([1.0, 1.3])
    # level: 0.5 * 2 + 0.5 * 1 = 1.5; trend: 0.2 * 0.5 = 0.1; damped by 0.9
    assert damped_holt([1.0, 2.0], 1) == pytest.approx([1.0, 1.59])
