"""Tests how the benchmarks of servers find a rate, and what they say of a server that does not come up."""

from __future__ import annotations

import sys

import pytest

from benchmarks.server_runs import confirmed_rate, highest_good_rate, serving


@pytest.mark.parametrize(("limit", "found"), [(0.01, 0.0), (100.0, 64.0), (0.3, 0.28125), (3.0, 3.0), (3.3, 3.25)])
def test_the_highest_good_rate_is_doubled_for_and_then_bisected(limit: float, found: float) -> None:
    assert highest_good_rate(lambda rate: 1.0 if rate <= limit else 0.5) == found


@pytest.mark.parametrize(("limit", "found"), [(5.0, 4.0), (3.6, 3.6), (3.3, 3.24), (0.01, 0.0)])
def test_a_rate_is_lowered_by_tenths_until_it_is_good_again(limit: float, found: float) -> None:
    assert confirmed_rate(lambda rate: 1.0 if rate <= limit else 0.5, 4.0) == pytest.approx(found)


def test_no_rate_is_not_confirmed() -> None:
    assert confirmed_rate(lambda rate: 1.0, 0.0) == 0.0


def test_a_server_that_ends_at_once_is_an_error_with_what_it_said() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no memory')"]
    with pytest.raises(RuntimeError, match="does not serve: no memory"), serving(lambda port: command):
        pass
