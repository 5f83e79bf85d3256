import pytest

from cluster.routing.costs.request_facts import RequestFacts, miss_probability


def test_a_missed_aim_costs_ten_times_what_the_whole_answer_may_take() -> None:
    assert RequestFacts(1024, 100, ttft_s=2.0, itl_s=0.05).penalty_s == pytest.approx(10 * (2.0 + 5.0))
    assert RequestFacts(1024, 100).penalty_s == 0


def test_an_aim_is_missed_half_of_the_time_if_it_is_the_prediction_and_surely_far_above() -> None:
    assert miss_probability(1.0, 1.0, 0.3) == 0.5
    assert miss_probability(1.0, None, 0.3) == 0
    found = [miss_probability(predicted_s, 1.0, 0.3) for predicted_s in (0.1, 0.5, 0.9, 1.5, 100.0)]
    assert found == sorted(found)
    assert found[0] < 1e-6
    assert found[-1] > 0.9
