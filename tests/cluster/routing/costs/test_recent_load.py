import math

import pytest

from actors.core.outputs.sent_work import SentWork
from cluster.routing.costs.recent_load import RecentLoad, RecentRates

_ALONE = SentWork(100, 0.1, 400, num_output_tokens=50)
_PAIR = (SentWork(100, 0.1, consumer="decode-0"), SentWork(num_context_tokens=400, num_output_tokens=50))


def _offer(load: RecentLoad, per_s: float, from_s: float, to_s: float, *works: SentWork) -> None:
    for number in range(round((to_s - from_s) * per_s)):
        for work in works:
            load.note(work, from_s + number / per_s)


@pytest.mark.parametrize("works", [(_ALONE,), _PAIR], ids=["alone", "pair"])
def test_a_load_is_known_from_its_first_second_on_whichever_way_its_requests_go(works: tuple[SentWork, ...]) -> None:
    load = RecentLoad()
    _offer(load, 20.0, 50.0, 51.0, *works)
    rates = load.rates(51.0)
    assert rates.num_requests == pytest.approx(20.0, rel=0.02)
    assert rates.num_computed_tokens == pytest.approx(100 * rates.num_requests)
    assert rates.num_prompt_tokens == pytest.approx(400 * rates.num_requests)
    assert rates.num_output_tokens == pytest.approx(50 * rates.num_requests)


def test_what_came_before_is_forgotten() -> None:
    load = RecentLoad()
    _offer(load, 100.0, 0.0, 20.0, _ALONE)
    _offer(load, 10.0, 20.0, 25.0, _ALONE)
    assert 10 + 90 * 0.3 < load.rates(25.0).num_requests < 10 + 90 * 0.4, "exp(-1) of it is left"
    _offer(load, 10.0, 25.0, 60.0, _ALONE)
    assert load.rates(60.0).num_requests == pytest.approx(10.0, rel=0.1)


def test_a_load_that_comes_after_a_quiet_time_is_known_from_its_first_second_on() -> None:
    load = RecentLoad()
    _offer(load, 10.0, 0.0, 20.0, _ALONE)
    assert load.rates(22.5).num_requests == pytest.approx(10 * math.exp(-0.5), rel=0.1)
    _offer(load, 40.0, 22.5, 23.5, _ALONE)
    assert load.rates(23.5).num_requests == pytest.approx(40.0, rel=0.02)


def test_a_few_requests_tell_nothing() -> None:
    load = RecentLoad()
    assert load.rates(1.0) == RecentRates()
    for _ in range(4):
        load.note(_ALONE, 1.0)
    assert load.rates(1.0) == RecentRates(), "no time has passed"
    assert load.rates(1.5).num_requests == 0.0, "less than four are left"
    _offer(load, 10.0, 1.5, 3.0, _ALONE)
    assert load.rates(3.0).num_requests > 5
    assert load.rates(60.0) == RecentRates()


def test_prompts_whose_vectors_are_wanted_are_no_part_of_it() -> None:
    load = RecentLoad()
    _offer(load, 20.0, 0.0, 1.0, _ALONE, SentWork(9000, 1.0))
    rates = load.rates(1.0)
    assert rates.num_computed_tokens == pytest.approx(100 * rates.num_requests)


def test_engines_that_compute_prompts_may_be_of_another_kind_than_those_that_decode() -> None:
    prefill, decode = RecentLoad(), RecentLoad()
    _offer(prefill, 20.0, 0.0, 1.0, _PAIR[0])
    _offer(decode, 20.0, 0.0, 1.0, _PAIR[1])
    rates = prefill.rates(1.0) + decode.rates(1.0)
    assert rates.num_requests == pytest.approx(20.0, rel=0.02)
    assert rates.num_computed_tokens == pytest.approx(100 * rates.num_requests)


def test_loads_of_two_kinds_of_engines_are_summed() -> None:
    assert RecentRates(1, 2, 3, 4) + RecentRates(10, 20, 30, 40) == RecentRates(11, 22, 33, 44)
