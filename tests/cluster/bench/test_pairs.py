from __future__ import annotations

import math

import pytest

from cluster.bench.pairs import MIN_PAIRS, Comparison, a_is_first, compare, median_interval


@pytest.mark.parametrize(
    ("num_values", "rank"),
    [
        # 2 * P(Binomial(n, 1/2) < k) <= 0.1, from tables of the sign test at 10 %, two-sided.
        (5, 1),
        (7, 1),
        (8, 2),
        (10, 2),
        (11, 3),
        (20, 6),
        (30, 11),
    ],
)
def test_the_interval_is_that_of_the_sign_test(num_values: int, rank: int) -> None:
    values = [float(value) for value in range(1, num_values + 1)]
    assert median_interval(values[::-1]) == (rank, num_values + 1 - rank)


def test_too_few_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="4 values are too few for an interval of 90%"):
        median_interval([1.0] * (MIN_PAIRS - 1))


def test_ratios_are_of_pairs_not_of_medians() -> None:
    a, b = [1.0, 2.0, 4.0, 8.0, 16.0], [2.0, 3.0, 8.0, 8.0, 48.0]
    assert compare(a, b) == Comparison(median_a=4.0, median_b=8.0, ratio=2.0, low=1.0, high=3.0)


def test_a_figure_that_is_missing_or_zero_has_no_ratio() -> None:
    assert math.isnan(compare([0.0] * 5, [1.0] * 5).ratio)
    assert math.isnan(compare([1.0] * 5, [math.nan] * 5).ratio)


def test_each_server_is_the_first_one_in_turns() -> None:
    assert [a_is_first(pair) for pair in range(4)] == [True, False, True, False]
