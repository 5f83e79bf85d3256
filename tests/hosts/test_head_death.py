"""The head's host dies, with what Ray's head knows on a disk that outlives it, and comes back at the same address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cluster.client import GenerateClient
from tests.hosts.load import NUM_TOKENS, NUM_WORKERS, load
from tests.hosts.ray_hosts import RayHosts
from tests.hosts.served import ENGINE_TIMEOUT_S, FULL, HEARTBEAT_TIMEOUT_S, Served
from tests.hosts.watching import is_idle, states, status_becomes
from tests.patience import TEST_S

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.more, pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_STATUS_TIMEOUT_S = 15.0
_CHANGE_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def served(
    serving: Callable[..., AbstractContextManager[Served]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("gcs")
    everywhere = {"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
    with serving(FULL, settings=everywhere, head_settings=_stored_in(store)) as started:
        yield started


def _stored_in(store: Path) -> dict[str, str]:
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(store)}


async def test_serving_goes_on_without_the_head_and_changes_with_the_next_one(served: Served) -> None:
    ray = served.ray
    logger.info("the controller is on host %d", served.number_of_controller())
    async with GenerateClient(served.address) as client:
        before = await client.status()
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS)
            ray.hosts[0].switch_off()
            # For longer than anybody but Ray waits for an answer.
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 4.0)
            without_head = await client.status(timeout_s=_STATUS_TIMEOUT_S)
            await seen.flows(NUM_WORKERS * NUM_TOKENS)
            # A head that starts takes this machine's processors for itself.
            longest_pause_s = max(seen.pauses_s)
            await _start_head_again(ray)
            assert await client.scale(decode=1, timeout_s=_CHANGE_TIMEOUT_S) == ["decode-0", "prefill-0"]
            await status_becomes(client, lambda status: len(status.engines) == 2, _CHANGE_TIMEOUT_S)
            await client.scale(decode=2, timeout_s=_CHANGE_TIMEOUT_S)
            await _engine_becomes(client, "decode-1", 2)
        logger.info("%s", seen.report())
        after = await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    # An ingress or engine that asked the head on the way of a token would have waited for at least this time.
    assert longest_pause_s < HEARTBEAT_TIMEOUT_S / 2
    assert len(without_head.engines) == 3
    kept = {engine.engine_id: engine.address for engine in before.engines if engine.engine_id != "decode-1"}
    assert {engine.engine_id: engine.address for engine in after.engines}.items() >= kept.items()


async def test_an_engine_that_dies_without_the_head_is_replaced_when_there_is_one_again(served: Served) -> None:
    ray = served.ray
    async with GenerateClient(served.address) as client:
        [engine] = [engine for engine in (await client.status()).engines if engine.engine_id == "decode-0"]
        [process] = served.host_at(engine.address).processes("ray::EngineActor")
        async with load(client, served.directory) as seen:
            await seen.flows(NUM_WORKERS * NUM_TOKENS // 4)
            ray.hosts[0].switch_off()
            process.kill()
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 4.0)
            without_head = await client.status(timeout_s=_STATUS_TIMEOUT_S)
            await seen.flows(NUM_WORKERS * NUM_TOKENS)
            longest_pause_s = max(seen.pauses_s)
            await _start_head_again(ray)
            await _engine_becomes(client, "decode-0", engine.incarnation + 1)
        logger.info("%s", seen.report())
        await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert longest_pause_s < ENGINE_TIMEOUT_S
    assert without_head.engines


async def _start_head_again(ray: RayHosts) -> None:
    ray.start_again(0)
    await asyncio.to_thread(ray.wait_started)


async def _engine_becomes(client: GenerateClient, engine_id: str, incarnation: int) -> None:
    """Wait until this incarnation of it serves."""
    expected = {engine_id: (incarnation, "ready")}
    await status_becomes(client, lambda status: states(status).items() >= expected.items(), _CHANGE_TIMEOUT_S)
