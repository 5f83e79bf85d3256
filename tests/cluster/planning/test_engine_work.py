"""The work of requests in engine-seconds."""

from __future__ import annotations

import msgspec
import pytest

from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import FEATURES, StepShape
from cluster.planning.engine_work import EngineSpeed, Work, WorkPrices, mean_context, speed_of_model
from cluster.planning.offered_load import LoadWindow, OfferedRequest
from tests.cluster.planning.plan_setup import COSTS, SPEED, WINDOW_S, window

LARGE_COSTS = tuple(
    {"step": 4e-3, "token": 2e-5, "token_above_512": 3e-5, "prefill": 1e-3, "prefill_pair": 1e-9}.get(name, 0.0)
    for name in FEATURES
)


def test_prompts_that_fill_a_step_together_take_the_time_of_that_step() -> None:
    model = StepCostModel(LARGE_COSTS)
    speed = speed_of_model(model, max_num_batched_tokens=2048, max_num_seqs=64, num_kv_tokens=100_000)
    pairs = 4 * 512 * 256
    step = StepShape(2048, num_prefills=4, num_prefill_pairs=pairs)
    assert speed.prompt_s(2048, pairs) == pytest.approx(model.seconds(step))
    assert 4 * speed.prompt_s(512, 512 * 256) == pytest.approx(model.seconds(step))


def test_a_decode_step_is_predicted_as_the_cost_model_predicts_it() -> None:
    model = StepCostModel(COSTS)
    assert SPEED.decode_step_s(40, 40_000) == pytest.approx(model.seconds(StepShape(40, 40, 40_000)))


def test_the_batch_is_the_largest_that_meets_the_aim() -> None:
    batch = SPEED.batch_within(0.01, 1000.0)
    assert SPEED.decode_step_s(batch, batch * 1000) <= 0.01 < SPEED.decode_step_s(batch + 1, (batch + 1) * 1000)
    assert SPEED.batch_within(1e-6, 1000.0) == 1
    assert SPEED.batch_within(None, 1000.0) == 64
    assert SPEED.batch_within(None, 10_000.0) == 19, "the cache holds no more"
    assert msgspec.structs.replace(SPEED, num_state_tokens=10_000).batch_within(None, 10_000.0) == 9


def test_an_output_token_costs_its_part_of_a_step_of_the_batch() -> None:
    request = OfferedRequest(0.0, 1000, 0, 101)
    prices = WorkPrices.at(SPEED, 0.02, mean_context([request]))
    batch = prices.batch
    step_s = SPEED.decode_step_s(batch, batch * mean_context([request]))
    assert prices.work_of([request]).decode_s == pytest.approx(100 * step_s / batch)


def test_the_rate_of_windows_is_the_work_of_their_requests_per_second() -> None:
    load = window(1, 4.0)
    prices = WorkPrices.at(SPEED, 0.02, 1000.0)
    work = prices.work_of(OfferedRequest(0.0, 1000, 0, 100) for _ in range(120))
    [rate] = prices.rates_of([load], WINDOW_S)
    assert rate is not None
    assert rate.prefill_s == pytest.approx(work.prefill_s / WINDOW_S)
    assert rate.decode_s == pytest.approx(work.decode_s / WINDOW_S)


def test_refused_requests_are_work_like_those_that_ended() -> None:
    prices = WorkPrices.at(SPEED, 0.02, 1000.0)
    served = window(1, 4.0)
    refused = msgspec.structs.replace(served, num_offered=2 * served.num_offered, num_refused=served.num_offered)
    [half], [whole] = (prices.rates_of([load], WINDOW_S) for load in (served, refused))
    assert half is not None
    assert whole is not None
    assert whole.prefill_s == pytest.approx(2 * half.prefill_s)
    assert whole.decode_s == pytest.approx(2 * half.decode_s)


def test_longer_prompts_are_seen_when_they_arrive() -> None:
    prices = WorkPrices.at(SPEED, 0.02, 1000.0)
    before = window(1, 4.0)
    longer = LoadWindow(2, num_offered=120, num_sized=120, num_prompt_tokens=120 * 3000)
    first, second = prices.rates_of([before, longer], WINDOW_S)
    assert first is not None
    assert second is not None
    assert second.prefill_s == pytest.approx(3 * first.prefill_s)
    assert second.decode_s == pytest.approx(first.decode_s)


def test_requests_of_which_none_has_ended_are_unknown_work_and_no_requests_are_none() -> None:
    prices = WorkPrices.at(SPEED, 0.02, 1000.0)
    assert prices.rates_of([LoadWindow(1), LoadWindow(2, num_offered=5)], WINDOW_S) == [Work(), None]


def test_a_slower_engine_takes_longer_for_everything() -> None:
    slow = SPEED.slower_by(1.5)
    assert slow.prompt_s(1000, 500_000) == pytest.approx(1.5 * SPEED.prompt_s(1000, 500_000))
    assert slow.decode_step_s(8, 8000) == pytest.approx(1.5 * SPEED.decode_step_s(8, 8000))


def test_a_transfer_takes_its_bytes_over_the_link() -> None:
    speed = msgspec.structs.replace(SPEED, kv_bytes_per_token=1000, link_bytes_per_s=1e6, link_round_trip_s=0.001)
    assert speed.transfer_s(500) == pytest.approx(0.501)
    assert msgspec.structs.replace(speed, num_state_tokens=300).transfer_s(500) == pytest.approx(0.801)
    assert SPEED.transfer_s(500) == 0.0


def test_the_error_of_a_speed_is_the_largest_of_its_kinds() -> None:
    residuals = (Residuals("decode", 100, low=-0.1, high=0.1), Residuals("prefill", 100, low=-0.2, high=0.3))
    speed = speed_of_model(StepCostModel(COSTS, residuals), 2048, 64, 1000)
    assert speed.sigma == pytest.approx(0.5 / 2.563)
    assert isinstance(speed, EngineSpeed)
