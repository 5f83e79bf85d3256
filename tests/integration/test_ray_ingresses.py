"""Three ingresses, killed one after the other under load: no client that reconnects loses anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.client import GenerateClient
from tests.integration.cluster_load import load
from tests.integration.served import ServeProcess, process_listening_at
from tests.patience import CLUSTER_S, TEST_S

_NUM_INGRESSES = 3


@pytest.mark.ray
@pytest.mark.more
@pytest.mark.timeout(TEST_S)
async def test_killing_any_of_three_ingresses_under_load_loses_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint("llama")
    config: dict[str, object] = {
        "model": {"model": str(directory), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.2},
        "decode": {"count": 1, "num_cpus": 0.2},
        "ingress": {"count": _NUM_INGRESSES, "port": 0},
    }
    process = ServeProcess(config, tmp_path)
    try:
        first = await asyncio.to_thread(process.wait_until_ready)
        await _kill_each(await _addresses(first), directory)
        assert await asyncio.to_thread(process.stop) == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def _addresses(first: str) -> list[str]:
    """Return the addresses of all ingresses, once all are open."""
    async with GenerateClient(first) as client, asyncio.timeout(CLUSTER_S):
        while True:
            ingresses = (await client.status()).ingresses
            if len(ingresses) == _NUM_INGRESSES and all(one.state == "ready" for one in ingresses):
                return [one.address for one in ingresses]
            await asyncio.sleep(0.2)


async def _kill_each(addresses: list[str], directory: Path) -> None:
    async with GenerateClient(addresses, spread=True) as client, load(client, directory):
        for number, address in enumerate(addresses):
            process_listening_at(int(address.rpartition(":")[2])).kill()
            async with asyncio.timeout(CLUSTER_S):
                while True:
                    ingress = (await client.status()).ingresses[number]
                    if (ingress.incarnation, ingress.state, ingress.address) == (2, "ready", address):
                        break
                    await asyncio.sleep(0.2)
