from __future__ import annotations

import math

import pytest

from cluster.bench.arrivals import Lengths, PlannedRequest, arrival_times, plan_random, retimed


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


def test_without_a_rate_all_requests_arrive_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, seed=1) == [0.0, 0.0, 0.0]


def test_the_last_request_arrives_when_the_rate_says() -> None:
    times = arrival_times(200, 4.0, 1.0, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50.0)


def test_the_same_seed_draws_the_same_times_and_another_one_others() -> None:
    assert arrival_times(9, 4.0, 0.5, seed=1) == arrival_times(9, 4.0, 0.5, seed=1)
    assert arrival_times(9, 4.0, 0.5, seed=1) != arrival_times(9, 4.0, 0.5, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_a_gamma_distribution(burstiness: float) -> None:
    """The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k)."""
    gaps = _gaps(arrival_times(20_000, 10.0, burstiness, seed=3))
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1)
    assert deviation / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_poisson_process_has_exponential_gaps() -> None:
    """Against the exponential distribution: P(gap > t) = exp(-10 t)."""
    gaps = _gaps(arrival_times(20_000, 10.0, 1.0, seed=3))
    for time_s in (0.01, 0.1, 0.3):
        share = sum(gap > time_s for gap in gaps) / len(gaps)
        assert share == pytest.approx(math.exp(-10 * time_s), abs=0.01)


def test_an_infinite_burstiness_makes_equal_gaps() -> None:
    assert arrival_times(4, 2.0, math.inf, seed=1) == [0.5, 1.0, 1.5, 2.0]


def test_variates_that_are_all_zero_make_a_burst() -> None:
    assert arrival_times(2, 2.0, 1e-300, seed=1) == [0.0, 0.0]


def test_lengths_are_as_given_or_within_the_range() -> None:
    assert plan_random([0.0, 0.5], Lengths(64, 8), seed=1) == [
        PlannedRequest(0, 0.0, 64, 8),
        PlannedRequest(1, 0.5, 64, 8),
    ]
    plan = plan_random([0.0] * 2000, Lengths(64, 8, 0.5), seed=1)
    assert {request.num_input_tokens for request in plan} == set(range(32, 97))
    assert {request.num_output_tokens for request in plan} == set(range(4, 13))


def test_no_length_is_zero() -> None:
    plan = plan_random([0.0] * 99, Lengths(1, 1, 0.99), seed=1)
    assert {request.num_input_tokens for request in plan} == {1, 2}


def test_a_plan_can_get_other_arrivals() -> None:
    plan = [PlannedRequest(0, 7.0, 3, 4, (5,))]
    assert retimed(plan, [0.25]) == [PlannedRequest(0, 0.25, 3, 4, (5,))]
