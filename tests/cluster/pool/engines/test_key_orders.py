"""The engines of a cluster agree on one order of keys before they load their models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.attention_report import AttentionReport, OrderOffer
from actors.process.ray_calls import FailureKind, RayCallFailed
from cluster.config import ClusterConfig
from cluster.pool.engines.key_orders import KeyOrders, choose_key_order, fixed_key_order

TORCH = (OrderOffer("torch", "plain", 1), OrderOffer("torch", "transposed", 1))
ANY_ORDER = AttentionReport(TORCH)
FAST = AttentionReport((OrderOffer("vllm_cpu", "transposed", 0), *TORCH))
PLAIN_ONLY = AttentionReport((OrderOffer("triton", "plain", 0),))
UNREADABLE = AttentionReport(())


@pytest.mark.parametrize(
    ("reports", "key_order"),
    [
        ([ANY_ORDER, ANY_ORDER], "plain"),
        ([FAST, FAST], "transposed"),
        ([ANY_ORDER, FAST], "transposed"),
        ([FAST, PLAIN_ONLY], "plain"),
        ([FAST, UNREADABLE], "transposed"),
        ([UNREADABLE], "plain"),
        ([AttentionReport((OrderOffer("vllm_cpu", "transposed", 0),)), PLAIN_ONLY], "plain"),
    ],
)
def test_the_fastest_backends_order_is_taken_if_every_engine_reads_it(
    reports: list[AttentionReport], key_order: str
) -> None:
    assert choose_key_order(reports)[0] == key_order
    assert choose_key_order(reversed(reports))[0] == key_order


@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        ({}, None),
        ({"cache": {"key_order": "transposed"}}, ("transposed", "cache.key_order names it")),
        ({"decode": {"cache": {"key_order": "plain"}}}, ("plain", "cache.key_order names it")),
        ({"decode": {"num_gpus": 1}}, ("plain", "engines run on GPUs")),
        ({"both": {"count": 0, "num_gpus": 1}}, None),
        ({"model": {"model": "m", "device": "cuda"}}, ("plain", "engines run on GPUs")),
        ({"prefill": {"cache": {"block_size": 32}}}, ("plain", "the engines' block sizes differ")),
    ],
)
def test_settings_may_leave_no_choice(settings: dict[str, Any], fixed: tuple[str, str] | None) -> None:
    assert fixed_key_order(ClusterConfig.model_validate(settings)) == fixed


async def test_engines_wait_for_each_others_reports_and_get_one_answer() -> None:
    said: list[str] = []
    orders = KeyOrders(ClusterConfig(), said.append)
    has_reported, may_report = asyncio.Event(), asyncio.Event()

    async def report_late() -> AttentionReport:
        has_reported.set()
        await may_report.wait()
        return FAST

    async def report_at_once() -> AttentionReport:
        return ANY_ORDER

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        early = tasks.create_task(orders.of_engine("prefill-0", report_at_once))
        late = tasks.create_task(orders.of_engine("decode-0", report_late))
        await has_reported.wait()
        assert not early.done()
        may_report.set()
    assert (early.result(), late.result()) == ("transposed", "transposed")
    reason = "vllm_cpu is the fastest attention backend of the engines' nodes"
    assert said == [f"order of keys in the KV cache: transposed, since {reason}"]


async def test_an_engine_that_is_not_started_or_dies_does_not_hold_up_the_others() -> None:
    async def report() -> AttentionReport:
        return FAST

    async def die() -> AttentionReport:
        raise RayCallFailed(FailureKind.DIED, "it is gone")

    without_room = KeyOrders(ClusterConfig(place_timeout_s=0.01), lambda text: None)
    assert await without_room.of_engine("prefill-0", report) == "transposed"
    orders = KeyOrders(ClusterConfig(), lambda text: None)
    with pytest.raises(RayCallFailed):
        await orders.of_engine("prefill-0", die)
    assert await orders.of_engine("decode-0", report) == "transposed"


async def test_what_is_chosen_stays_so_for_later_engines_which_are_not_asked() -> None:
    async def nobody_asks() -> AttentionReport:
        raise AssertionError("it was asked")

    orders = KeyOrders(ClusterConfig(), lambda text: None)
    orders.keep("transposed")
    assert await orders.of_engine("decode-7", nobody_asks) == "transposed"
    named = KeyOrders(ClusterConfig.model_validate({"cache": {"key_order": "plain"}}), lambda text: None)
    assert await named.of_engine("decode-7", nobody_asks) == "plain"
