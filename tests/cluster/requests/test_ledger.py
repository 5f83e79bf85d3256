"""A request's ledger: what is charged once, and what is given back."""

from __future__ import annotations

import asyncio

import pytest

from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.errors import AllowanceSpent, Overloaded
from cluster.images.image_budget import ImageBudget
from cluster.requests.ledger import open_ledger
from cluster.requests.overload_control import OverloadControl
from tests.cluster.access.test_allowance import Clock


def make_overload_control() -> OverloadControl:
    return OverloadControl(max_requests=1, max_waiting_tokens=100, clock=Clock())


async def test_a_prompt_is_charged_once_though_its_request_begins_anew() -> None:
    allowance = Allowance("t", AllowanceLimits(tokens_per_s=10.0, burst_s=1.0), Clock())
    overload_control = make_overload_control()
    with open_ledger(overload_control, ImageBudget(0, 1.0), allowance, None) as ledger:
        ledger.take_prompt(30, 30)
        ledger.take_prompt(30, 30)
        assert (ledger.is_waiting, overload_control.num_waiting_tokens) == (True, 30)
        ledger.take_output(0)
        assert ledger.is_waiting, "an output without tokens begins nothing"
        ledger.take_output(5)
        assert (ledger.is_waiting, overload_control.num_waiting_tokens) == (False, 0)
    with pytest.raises(AllowanceSpent) as raised:
        allowance.begin()
    assert raised.value.retry_delay_s == pytest.approx((35 - 10) / 10)


async def test_nothing_is_counted_for_a_request_that_has_ended() -> None:
    allowance, overload_control = Allowance(), make_overload_control()
    with open_ledger(overload_control, ImageBudget(0, 1.0), allowance, None) as ledger:
        ledger.take_prompt(30, 30)
        another = open_ledger(overload_control, ImageBudget(0, 1.0), allowance, None)
        with pytest.raises(Overloaded, match="1 requests are in flight"):
            another.__enter__()
    assert (overload_control.num_requests, overload_control.num_waiting_tokens, allowance.num_running) == (0, 0, 0)


async def test_the_time_that_is_left_is_the_clients() -> None:
    with open_ledger(make_overload_control(), ImageBudget(0, 1.0), Allowance(), None) as ledger:
        assert (ledger.deadline_s, ledger.time_left_s()) == (None, None)
    now_s = asyncio.get_running_loop().time()
    with open_ledger(make_overload_control(), ImageBudget(0, 1.0), Allowance(), 60.0) as ledger:
        assert ledger.deadline_s is not None
        assert now_s + 60.0 <= ledger.deadline_s <= asyncio.get_running_loop().time() + 60.0
