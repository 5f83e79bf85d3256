"""A decode engine's host is cut off from the network under load: for a moment, and for longer than others wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from tests.hosts.host import Host
from tests.hosts.load import NUM_TOKENS, NUM_WORKERS, Load, load
from tests.hosts.ray_hosts import NODE_DEATH_S
from tests.hosts.served import ENGINE_TIMEOUT_S, FULL, HEARTBEAT_TIMEOUT_S, Served
from tests.hosts.watching import is_idle, is_waiting, states, status_becomes
from tests.patience import TEST_S

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.more, pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_SHORT_S = ENGINE_TIMEOUT_S + 1.0
_AFTERWARDS_S = 6.0
"""Streams go on for so long after a cut."""
_OLD_END_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def served(serving: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    with serving(FULL) as started:
        yield started


async def test_prefill_and_decode_on_two_hosts_hand_over_by_tcp(served: Served) -> None:
    def has_handed_over(status: admin_pb2.GetStatusResponse) -> bool:
        decoding = [engine for engine in status.engines if engine.role == "decode"]
        return sum(engine.transfers.completed for engine in decoding) >= len(decoding) + NUM_WORKERS

    async with GenerateClient(served.address) as client:
        async with load(client, served.directory):
            pass
        status = await status_becomes(client, has_handed_over, _IDLE_TIMEOUT_S)
    address = {engine.engine_id: engine.address.partition(":")[0] for engine in status.engines}
    assert sorted(address.values()) == [host.address for host in served.ray.hosts[1:]]
    for engine in status.engines:
        assert engine.kv_transport == "tcp"
        if engine.role == "decode":
            assert [(link.peer_engine_id, link.state) for link in engine.links] == [("prefill-0", "open")]
            assert engine.transfers.received_bytes > 0


async def test_after_a_short_cut_the_same_engine_serves_again(served: Served) -> None:
    victim = served.ray.hosts[served.victim()]
    async with GenerateClient(served.address) as client:
        before = states(await client.status())
        async with load(client, served.directory) as seen:
            await _cut(client, victim, seen, _SHORT_S)
            await asyncio.sleep(_AFTERWARDS_S)
        _check_pauses(seen)
        # What the engine worked on while nobody listened is aborted there, too.
        status = await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert states(status) == before


async def test_an_engine_that_was_given_up_ends_when_the_network_is_back(served: Served) -> None:
    """The controller has replaced it, but Ray has not missed its node yet."""
    victim = served.ray.hosts[served.victim()]
    [old] = victim.processes("ray::EngineActor")
    async with GenerateClient(served.address) as client:
        [engine] = [e for e in (await client.status()).engines if served.host_at(e.address) is victim]
        async with load(client, served.directory) as seen:
            await _cut(client, victim, seen, HEARTBEAT_TIMEOUT_S + 1.0)
            await asyncio.to_thread(old.wait, _OLD_END_TIMEOUT_S)
            successor = {engine.engine_id: (engine.incarnation + 1, "ready")}
            await status_becomes(client, lambda status: states(status).items() >= successor.items(), _START_TIMEOUT_S)
        _check_pauses(seen)
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert len(victim.processes("ray::EngineActor")) == 1


async def test_a_node_that_ray_has_given_up_ends_and_joins_again(served: Served) -> None:
    number = served.victim()
    victim = served.ray.hosts[number]
    [old] = victim.processes("ray::EngineActor")
    async with GenerateClient(served.address) as client:
        [engine] = [e for e in (await client.status()).engines if served.host_at(e.address) is victim]
        async with load(client, served.directory) as seen:
            await _until_it_decodes(client, victim, seen)
            with victim.cable.cut_off():
                waiting, needs = (engine.engine_id, engine.incarnation + 1), "{'decode': 1"
                await status_becomes(client, lambda s: is_waiting(s, *waiting, needs), NODE_DEATH_S)
                await asyncio.sleep(NODE_DEATH_S)
            await asyncio.to_thread(old.wait, _OLD_END_TIMEOUT_S)
            await asyncio.to_thread(served.ray.ray_processes[number].wait, _OLD_END_TIMEOUT_S)
            # As Kubernetes does with a container that has ended.
            served.ray.start_again(number)
            successor = {engine.engine_id: (engine.incarnation + 1, "ready")}
            await status_becomes(client, lambda status: states(status).items() >= successor.items(), _START_TIMEOUT_S)
        _check_pauses(seen)
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)


async def _until_it_decodes(client: GenerateClient, victim: Host, seen: Load) -> None:
    """Wait until streams are under way, some of them at this host's engine, which may have started just now."""

    def decodes(status: admin_pb2.GetStatusResponse) -> bool:
        engines = [engine for engine in status.engines if engine.address.partition(":")[0] == victim.address]
        return any(engine.load.running for engine in engines)

    await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
    await status_becomes(client, decodes, _IDLE_TIMEOUT_S)


async def _cut(client: GenerateClient, victim: Host, seen: Load, duration_s: float) -> None:
    """Cut it off in the middle of streams."""
    await _until_it_decodes(client, victim, seen)
    with victim.cable.cut_off():
        await asyncio.sleep(duration_s)


def _check_pauses(seen: Load) -> None:
    logger.info("%s", seen.report())
    assert ENGINE_TIMEOUT_S - 1.0 < max(seen.pauses_s) < ENGINE_TIMEOUT_S + 1.0
