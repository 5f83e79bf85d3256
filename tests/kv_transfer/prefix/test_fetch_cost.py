from __future__ import annotations

import pytest

from kv_transfer.prefix.fetch_cost import FetchCost, LinearCost


def test_a_line_is_found_in_what_was_seen() -> None:
    cost = LinearCost()
    for amount in (10, 40, 80, 20):
        cost.observe(amount, 0.5 + 0.01 * amount)
    assert cost.estimate(100) == pytest.approx(1.5)
    assert cost.estimate(0) == pytest.approx(0.5)


def test_nothing_is_estimated_from_too_little() -> None:
    cost = LinearCost()
    cost.observe(10, 1.0)
    cost.observe(20, 2.0)
    assert cost.estimate(10) is None


@pytest.mark.parametrize(("is_start_up", "expected"), [(False, 2.0), (True, 1.0)])
def test_amounts_that_are_all_alike_are_all_slope_or_all_start_up(is_start_up: bool, expected: float) -> None:
    cost = LinearCost(is_start_up=is_start_up)
    for _ in range(5):
        cost.observe(10, 1.0)
    assert cost.estimate(20) == pytest.approx(expected)


def test_short_fetches_that_were_not_worth_it_do_not_speak_against_long_ones() -> None:
    cost = FetchCost()
    for num_tokens in (16, 64, 256):
        cost.observe_steps(num_tokens, (0.0001 * num_tokens,))
    for _ in range(5):
        cost.observe_fetch(8, 0.020)
    assert not cost.is_worth_it(8, 128), "20 ms against 13 ms"
    assert cost.is_worth_it(96, 1536), "perhaps 20 ms, too, against 154 ms"


def test_neither_part_of_a_line_is_negative() -> None:
    cost = LinearCost()
    for amount, seconds in ((10, 3.0), (20, 2.0), (30, 1.0)):
        cost.observe(amount, seconds)
    assert cost.estimate(1000) == pytest.approx(2.0, rel=0.02)
    steep = LinearCost()
    for amount, seconds in ((10, 0.0), (20, 1.0), (30, 2.0)):
        steep.observe(amount, seconds)
    assert steep.estimate(0) == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    cost = LinearCost()
    for amount in (10, 20, 30):
        cost.observe(amount, 100.0 * amount)
    for _ in range(200):
        for amount in (10, 20, 30):
            cost.observe(amount, 0.1 * amount)
    assert cost.estimate(20) == pytest.approx(2.0, rel=0.01)


def _learn(cost: FetchCost, *, step_s_per_token: float, fetch_s_per_block: float) -> None:
    for amount in (16, 32, 64):
        cost.observe_steps(amount, (0.001 + step_s_per_token * amount,))
        cost.observe_fetch(amount // 16, 0.005 + fetch_s_per_block * amount / 16)


def test_a_fetch_is_tried_until_it_is_known() -> None:
    cost = FetchCost()
    assert cost.is_worth_it(4, 64)
    assert not cost.is_worth_it(4, 0), "it spares nothing"


def test_the_quicker_way_is_taken() -> None:
    cost = FetchCost()
    _learn(cost, step_s_per_token=0.001, fetch_s_per_block=0.001)
    assert cost.is_worth_it(10, 160)
    assert not cost.is_worth_it(1, 1), "less than the start-up of a fetch"


def test_the_slower_way_is_tried_again_once_in_a_while() -> None:
    cost = FetchCost()
    _learn(cost, step_s_per_token=0.00001, fetch_s_per_block=1.0)
    tries = sum(cost.is_worth_it(10, 160) for _ in range(1010))
    assert tries == 10
