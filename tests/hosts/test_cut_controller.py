"""The controller's host is cut off from the network, or its raylet is stuck.

The controller must not take its own silence for everybody else's death; once Ray has started another one, it must end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from cluster.client import GenerateClient
from tests.hosts.load import NUM_TOKENS, NUM_WORKERS, load
from tests.hosts.ray_hosts import NODE_DEATH_S
from tests.hosts.served import ENGINE_TIMEOUT_S, FULL, HEARTBEAT_TIMEOUT_S, Served
from tests.hosts.watching import is_idle, states, status_becomes
from tests.patience import TEST_S

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.more, pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_AFTERWARDS_S = 10.0
_BACK_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def served(serving: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    with serving(FULL) as started:
        yield started


async def test_a_controller_that_was_cut_off_for_a_while_has_given_nobody_up(served: Served) -> None:
    host = served.ray.hosts[served.number_of_controller()]
    async with GenerateClient(served.address) as client:
        before = states(await client.status())
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            with host.cable.cut_off():
                await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 1.0)
            await asyncio.sleep(_AFTERWARDS_S)
        logger.info("%s", seen.report())
        assert max(seen.pauses_s) < ENGINE_TIMEOUT_S + 1.0
        status = await status_becomes(client, lambda s: not s.controller_error and is_idle(s), _IDLE_TIMEOUT_S)
    assert states(status) == before


async def test_when_the_controllers_host_is_lost_it_goes_on_elsewhere_with_the_engines_that_are_there(
    served: Served,
) -> None:
    number = served.number_of_controller()
    host = served.ray.hosts[number]
    async with GenerateClient(served.address) as client:
        before = await client.status()
        [lost] = [engine for engine in before.engines if served.host_at(engine.address) is host]
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            with host.cable.cut_off():
                await asyncio.sleep(NODE_DEATH_S)
                gone = {lost.engine_id: (lost.incarnation + 1, "pending")}
                await status_becomes(client, lambda s: states(s).items() >= gone.items(), _BACK_TIMEOUT_S)
            await asyncio.to_thread(served.ray.ray_processes[number].wait, _BACK_TIMEOUT_S)
            served.ray.start_again(number)
            await asyncio.to_thread(served.ray.wait_started)
            after = {engine.engine_id: (engine.incarnation, "ready") for engine in before.engines}
            after[lost.engine_id] = (lost.incarnation + 1, "ready")
            await status_becomes(client, lambda s: states(s) == after, _BACK_TIMEOUT_S)
        logger.info("%s", seen.report())
        assert max(seen.pauses_s) < ENGINE_TIMEOUT_S + 1.0
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert served.number_of_controller() != number


async def test_a_controller_that_ray_has_replaced_ends_though_nobody_ends_its_process(served: Served) -> None:
    number = served.number_of_controller()
    host = served.ray.hosts[number]
    [old] = host.processes("ray::Controller")
    [raylet] = host.processes("raylet/raylet")
    async with GenerateClient(served.address) as client:
        before = await client.status()
        [lost] = [engine for engine in before.engines if served.host_at(engine.address) is host]
        # Ray declares the node dead, whose processes run on and reach everybody: only the raylet would end them.
        raylet.suspend()
        await asyncio.to_thread(old.wait, NODE_DEATH_S + _BACK_TIMEOUT_S)
        gone = {lost.engine_id: (lost.incarnation + 1, "pending")}
        await status_becomes(client, lambda s: states(s).items() >= gone.items(), _BACK_TIMEOUT_S)
        served.ray.start_again(number)
        await asyncio.to_thread(served.ray.wait_started)
        after = {engine.engine_id: (engine.incarnation, "ready") for engine in before.engines}
        after[lost.engine_id] = (lost.incarnation + 1, "ready")
        await status_becomes(client, lambda s: states(s) == after, _BACK_TIMEOUT_S)
    assert served.number_of_controller() != number
