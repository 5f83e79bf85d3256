"""Whole nodes are lost, and Ray takes its time to notice, as it does by default: our heartbeats do not wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from cluster.client import GenerateClient
from tests.hosts.load import NUM_TOKENS, NUM_WORKERS, load
from tests.hosts.served import ENGINE_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, ROOMY, Served
from tests.hosts.watching import is_idle, is_waiting, is_whole, states, status_becomes
from tests.patience import TEST_S

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.more, pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_RAYS_PATIENCE = 40
"""The number of health checks, one each two seconds while a node is silent, after which Ray calls a node dead."""
_REPLACED_S = HEARTBEAT_TIMEOUT_S + 45.0
"""The time for a replacement, which has to be over before Ray calls the node dead."""
_JOINED_S = 120.0
_IDLE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def served(serving: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    with serving(ROOMY, settings={"RAY_health_check_failure_threshold": str(_RAYS_PATIENCE)}) as started:
        yield started


async def test_a_cut_off_engine_is_replaced_on_another_host_while_its_own_is_away(served: Served) -> None:
    victim = served.ray.hosts[served.victim()]
    [old] = victim.processes("ray::EngineActor")
    async with GenerateClient(served.address) as client:
        [engine] = [e for e in (await client.status()).engines if served.host_at(e.address) is victim]
        successor = {engine.engine_id: (engine.incarnation + 1, "ready")}
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            with victim.cable.cut_off():
                status = await status_becomes(client, lambda s: states(s).items() >= successor.items(), _REPLACED_S)
            await asyncio.to_thread(old.wait, 60.0)
            await seen.flows(NUM_WORKERS * NUM_TOKENS)
        logger.info("%s", seen.report())
        assert max(seen.pauses_s) < ENGINE_TIMEOUT_S + 1.0
        [address] = [e.address for e in status.engines if e.engine_id == engine.engine_id]
        assert served.host_at(address) is not victim
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert not victim.processes("ray::EngineActor")


async def test_the_engine_of_a_dead_node_is_replaced_on_another(served: Served) -> None:
    async with GenerateClient(served.address) as client:
        engine = next(engine for engine in (await client.status()).engines if engine.role == "decode")
        host = served.host_at(engine.address)
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            host.switch_off()
            successor = {engine.engine_id: (engine.incarnation + 1, "ready")}
            # The other decode engine may have been there, too.
            status = await status_becomes(
                client, lambda s: states(s).items() >= successor.items() and is_whole(s), _JOINED_S
            )
        logger.info("%s", seen.report())
        assert max(seen.pauses_s) < ENGINE_TIMEOUT_S
        assert all(served.host_at(engine.address) is not host for engine in status.engines)
        served.ray.start_again(served.ray.hosts.index(host))
        await asyncio.to_thread(served.ray.wait_started)


async def test_an_engine_without_a_node_says_what_it_needs_until_one_comes(served: Served) -> None:
    async with GenerateClient(served.address) as client:
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            served.ray.hosts[1].switch_off()
            needs = "{'prefill': 1"
            await status_becomes(client, lambda s: is_waiting(s, "prefill-0", 2, needs), _REPLACED_S)
            # Decode engines do without it.
            await seen.flows(NUM_WORKERS * NUM_TOKENS)
            served.ray.start_again(1)
            await asyncio.to_thread(served.ray.wait_started)
            ready = {"prefill-0": (2, "ready")}
            await status_becomes(client, lambda s: states(s).items() >= ready.items(), _JOINED_S)
        logger.info("%s", seen.report())
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
