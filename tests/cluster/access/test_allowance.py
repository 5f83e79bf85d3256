from __future__ import annotations

import pytest

from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.errors import AllowanceSpent


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(clock: Clock | None = None, **limits: float) -> Allowance:
    return Allowance("t", AllowanceLimits(**limits), clock or Clock())  # type: ignore[arg-type]  # concurrent is an int


def test_requests_beyond_the_rate_wait_for_as_long_as_the_error_says() -> None:
    clock = Clock()
    allowance = make(clock, requests_per_s=2.0, burst_s=1.0)
    allowance.begin()
    allowance.begin()

    with pytest.raises(AllowanceSpent, match=r"'t' is at its limit of 2 requests/s; retry in 0.5 s") as raised:
        allowance.begin()
    assert allowance.num_running == 2

    clock.now_s += raised.value.retry_delay_s
    allowance.begin()
    assert allowance.num_running == 3


def test_tokens_are_paid_for_after_they_were_used() -> None:
    clock = Clock()
    allowance = make(clock, tokens_per_s=10.0, burst_s=1.0)
    allowance.begin()
    allowance.charge(60)
    allowance.charge(0)

    with pytest.raises(AllowanceSpent, match="10 tokens/s") as raised:
        allowance.begin()
    assert raised.value.retry_delay_s == pytest.approx(5.0)

    clock.now_s += 5.0
    allowance.begin()


def test_an_unused_rate_is_not_kept_for_longer_than_the_burst() -> None:
    clock = Clock()
    allowance = make(clock, requests_per_s=1.0, burst_s=3.0)
    clock.now_s += 1000.0
    for _ in range(3):
        allowance.take_request()
    with pytest.raises(AllowanceSpent):
        allowance.take_request()


def test_requests_at_once_are_counted_until_they_end() -> None:
    allowance = make(concurrent=1)
    allowance.begin()
    with pytest.raises(AllowanceSpent, match="1 requests at once"):
        allowance.begin()
    allowance.end()
    allowance.begin()
    assert allowance.num_running == 1


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    allowance = make(clock, requests_per_s=1.0, tokens_per_s=1.0, burst_s=1.0)
    allowance.charge(2)
    for _ in range(5):
        with pytest.raises(AllowanceSpent, match="tokens/s"):
            allowance.begin()
    clock.now_s += 1.0
    allowance.begin()
