"""Faults that only a network has: packets are lost, for a while or all along."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import IMPATIENT, TRANSFER, LiveEngines
from tests.faults.two_hosts import TwoHosts

pytestmark = [pytest.mark.more, pytest.mark.alone]

OUTAGE_S = 2.0


async def test_an_outage_longer_than_the_deadlines_costs_no_token(
    engines_on_hosts: LiveEngines, hosts: TwoHosts
) -> None:
    engines = engines_on_hosts
    prefill, decode = await engines.start_pair(transfer=IMPATIENT)
    await engines.check_handed_over(prefill, decode)
    answer = await engines.ask_until_fired(Fault(Action.HOLD, Point.BEFORE_CHUNK, 3), prefill, prefill, decode)
    with hosts.dropping_everything():
        prefill.call("release")
        await asyncio.sleep(OUTAGE_S)
        assert hosts.num_dropped() > 0
    await answer
    assert decode.count("num_prompt_tokens_computed") > 0
    await engines.check_whole(prefill, decode)
    await engines.check_pair(engines.ask(), prefill, decode)
    await engines.check_handed_over(prefill, decode)


async def test_an_outage_shorter_than_the_deadlines_costs_time_only(
    engines_on_hosts: LiveEngines, hosts: TwoHosts
) -> None:
    engines = engines_on_hosts
    # TCP waits up to twice as long as an outage before it sends again, and a busy machine makes one longer.
    assert TRANSFER.link_timeout_s > 10 * OUTAGE_S
    prefill, decode = await engines.start_pair()
    prefill.arm(Fault(Action.HOLD, Point.BEFORE_CHUNK, 3))
    answer = asyncio.create_task(engines.check_pair(engines.ask(), prefill, decode))
    await prefill.wait_fired()
    with hosts.dropping_everything():
        prefill.call("release")
        await asyncio.sleep(OUTAGE_S)
    await answer
    await engines.check_whole(prefill, decode)
    assert (decode.count("num_prompt_tokens_computed"), decode.count("num_links_lost")) == (0, 0)


async def test_while_packets_are_lost_every_token_is_right(engines_on_hosts: LiveEngines, hosts: TwoHosts) -> None:
    engines = engines_on_hosts
    prefill, decode = await engines.start_pair()
    before = hosts.num_dropped()
    with hosts.losing_packets():
        for _ in range(5):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(engines.check_pair(engines.ask(), prefill, decode))
        assert hosts.num_dropped() > before
    await engines.check_whole(prefill, decode)
    await engines.check_handed_over(prefill, decode)
