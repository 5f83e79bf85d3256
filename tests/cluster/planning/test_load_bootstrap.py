"""The load that is drawn for the near future."""

from __future__ import annotations

import pytest

from cluster.planning.engine_work import Work, WorkPrices
from cluster.planning.load_bootstrap import DrawnLoad, draw_load
from cluster.planning.offered_load import OfferedRequest
from tests.cluster.planning.plan_setup import SPEED

PRICES = WorkPrices.at(SPEED, 0.02, 1000.0)
EVEN = [OfferedRequest(float(i), 500 + i % 7, 0, 50) for i in range(400)]


def test_the_drawn_load_brings_the_wanted_work() -> None:
    load = draw_load(EVEN, PRICES, Work(1.5, 0.5), 200, seed=1)
    assert len(load.requests) == 200
    assert PRICES.work_of(load.requests).total_s / load.duration_s == pytest.approx(2.0)
    assert load.requests[0].arrived_at_s == 0.0
    assert load.requests[-1].arrived_at_s < load.duration_s


def test_equal_seeds_draw_equal_loads() -> None:
    work = Work(1.5, 0.5)
    assert draw_load(EVEN, PRICES, work, 100, seed=1) == draw_load(EVEN, PRICES, work, 100, seed=1)
    assert draw_load(EVEN, PRICES, work, 100, seed=1) != draw_load(EVEN, PRICES, work, 100, seed=2)


def test_twice_the_work_comes_twice_as_fast() -> None:
    once = draw_load(EVEN, PRICES, Work(1.0, 0.0), 100, seed=1)
    twice = draw_load(EVEN, PRICES, Work(2.0, 0.0), 100, seed=1)
    assert twice.rate_per_s == pytest.approx(2 * once.rate_per_s)
    assert [one.num_prompt_tokens for one in twice.requests] == [one.num_prompt_tokens for one in once.requests]


def test_bursts_stay_bursts() -> None:
    bursts = [OfferedRequest(100.0 * (i // 20) + 0.01 * (i % 20), 500, 0, 50) for i in range(400)]
    load = draw_load(bursts, PRICES, Work(1.0, 0.0), 200, seed=1)
    gaps = [b.arrived_at_s - a.arrived_at_s for a, b in zip(load.requests, load.requests[1:], strict=False)]
    mean_s = sum(gaps) / len(gaps)
    assert sum(gap < mean_s / 10 for gap in gaps) > 0.9 * len(gaps)
    assert max(gaps) > 10 * mean_s


def test_a_shift_of_the_mix_is_drawn_from_the_newest_requests() -> None:
    answers = [OfferedRequest(400.0 + i, 50, 0, 2000) for i in range(200)]
    decode_heavy = PRICES.work_of(answers)
    load = draw_load([*EVEN, *answers], PRICES, Work(decode_heavy.prefill_s, decode_heavy.decode_s), 100, seed=1)
    assert {one.num_output_tokens for one in load.requests} == {2000}


def test_an_uncertain_forecast_of_prompts_draws_no_requests_of_a_load_that_is_over() -> None:
    answers = [OfferedRequest(400.0 + i, 50, 0, 2000) for i in range(400)]
    expected = PRICES.work_of(answers)
    high = Work(expected.prefill_s + expected.decode_s / 20, expected.decode_s)
    drawn = draw_load([*EVEN, *answers], PRICES, high, 100, seed=1, mix=expected)
    assert {one.num_output_tokens for one in drawn.requests} == {2000}
    assert PRICES.work_of(drawn.requests).total_s / drawn.duration_s == pytest.approx(high.total_s)
    mixed = draw_load([*EVEN, *answers], PRICES, high, 100, seed=1)
    assert {one.num_output_tokens for one in mixed.requests} == {50, 2000}


def test_without_requests_or_work_there_is_no_load() -> None:
    assert draw_load([], PRICES, Work(1.0, 1.0), 100, seed=1) == DrawnLoad()
    assert draw_load(EVEN, PRICES, Work(), 100, seed=1) == DrawnLoad()
    assert DrawnLoad().rate_per_s == 0.0


def test_requests_that_came_at_once_are_spread() -> None:
    load = draw_load([OfferedRequest(5.0, 500, 0, 50)] * 30, PRICES, Work(1.0, 0.0), 60, seed=1)
    assert len({one.arrived_at_s for one in load.requests}) == 60
