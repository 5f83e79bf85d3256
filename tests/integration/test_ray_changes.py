"""Engines come, go and change their role in a running cluster, and no request notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.client import CallFailed, GenerateClient
from tests.integration.cluster_load import engines_become, load
from tests.integration.served import ServeProcess
from tests.patience import CLUSTER_S, TEST_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def served(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.2},
        "decode": {"count": 1, "num_cpus": 0.8},
        "ingress": {"count": 2},
        "drain_timeout_s": 20,
    }
    process = ServeProcess(config, tmp_path_factory.mktemp("changes"))
    try:
        yield process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def test_engines_come_and_go_under_load(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        assert await client.scale(decode=2) == ["decode-0", "decode-1", "prefill-0"]
        pair = {("prefill-0", 1, "prefill"), ("decode-0", 1, "decode")}
        await engines_become(client, pair | {("decode-1", 1, "decode")})
        # A rolling restart of all engines, one after the other.
        await client.drain("decode-0")
        await engines_become(
            client, {("prefill-0", 1, "prefill"), ("decode-0", 2, "decode"), ("decode-1", 1, "decode")}
        )
        await client.drain("prefill-0")
        await engines_become(
            client, {("prefill-0", 2, "prefill"), ("decode-0", 2, "decode"), ("decode-1", 1, "decode")}
        )
        await client.drain("decode-1", for_good=True)
        await engines_become(client, {("prefill-0", 2, "prefill"), ("decode-0", 2, "decode")})
        status = await client.status()
    assert any("scale to 2 decode" in decision.text for decision in status.decisions)


async def test_an_engine_changes_its_role_under_load(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        await client.set_role("prefill-0", "both")
        await engines_become(client, {("prefill-0", 2, "both"), ("decode-0", 2, "decode")})
        await client.set_role("prefill-0", "prefill")
        await engines_become(client, {("prefill-0", 2, "prefill"), ("decode-0", 2, "decode")})


async def test_what_cannot_be_placed_is_shown_with_what_is_missing(
    served: str, checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        await client.scale(decode=3)
        async with asyncio.timeout(CLUSTER_S):
            while True:
                pending = [engine for engine in (await client.status()).engines if engine.state == "pending"]
                if len(pending) == 1 and "it needs" in pending[0].last_error:
                    break
                await asyncio.sleep(0.2)
        assert "it needs {'CPU': 0.8} on one node; the cluster has" in pending[0].last_error
        await client.scale(decode=1)
        await engines_become(client, {("prefill-0", 2, "prefill"), ("decode-0", 2, "decode")})


async def test_an_engine_that_is_not_there_cannot_be_drained(served: str) -> None:
    async with GenerateClient(served) as client:
        with pytest.raises(CallFailed, match="no engine 'decode-9' serves; these do: decode-0, prefill-0"):
            await client.drain("decode-9")


async def test_every_ingress_knows_who_serves(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client:
        before = await client.status()
    addresses = [ingress.address for ingress in before.ingresses]
    assert served in addresses
    assert len(set(addresses)) == 2
    async with (
        GenerateClient(addresses[0]) as first,
        GenerateClient(addresses[1]) as second,
        load(first, checkpoint("llama")),
        load(second, checkpoint("llama")),
    ):
        [old] = [engine for engine in before.engines if engine.engine_id == "decode-0"]
        await first.drain("decode-0")
        expected = {("prefill-0", 2, "prefill"), ("decode-0", old.incarnation + 1, "decode")}
        versions = {(await engines_become(client, expected)).membership_version for client in (first, second)}
    assert len(versions) == 1
