"""`raypd explain` on a live cluster with two ingresses: any of them is asked, also when the other one was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cluster.client import CallFailed, GenerateClient
from cluster.commands.status.explanation import Asked, show_explanation
from tests.integration.served import ServeProcess, process_listening_at
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import random_prompt


@pytest.mark.ray
@pytest.mark.more
@pytest.mark.timeout(TEST_S)
async def test_any_ingress_explains_a_request_and_names_one_that_was_killed(
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
        "ingress": {"count": 2, "port": 0},
    }
    process = ServeProcess(config, tmp_path)
    try:
        first = await asyncio.to_thread(process.wait_until_ready)
        zero, one = [await _address_of(first, number, incarnation=1) for number in range(2)]
        for address, request_id, ingress in ((zero, "at-zero", "ingress-0"), (one, "at-one", "ingress-1")):
            await _ask(address, request_id)
            for asked in (zero, one):
                await _check(asked, request_id, ingress)
        process_listening_at(int(zero.rpartition(":")[2])).kill()
        assert "ingress-0 did not answer, and may have further records" in await _explain(one, "at-one")
        with pytest.raises(CallFailed, match="may be at an ingress that did not answer: ingress-0"):
            await _explain(one, "at-zero")
        assert await _address_of(one, 0, incarnation=2) == zero
        await _check(zero, "at-one", "ingress-1")
        with pytest.raises(CallFailed, match="an ingress that was restarted has none from before") as failed:
            await _explain(zero, "at-zero")
        assert "did not answer" not in str(failed.value)
        assert await asyncio.to_thread(process.stop) == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def _address_of(known: str, number: int, *, incarnation: int) -> str:
    """Return an ingress's address, once this incarnation of it lets clients in. known: address of any ingress"""
    async with GenerateClient(known) as client, asyncio.timeout(CLUSTER_S):
        while True:
            for ingress in (await client.status()).ingresses:
                if (ingress.number, ingress.incarnation, ingress.state) == (number, incarnation, "ready"):
                    return ingress.address
            await asyncio.sleep(0.2)


async def _ask(address: str, request_id: str) -> None:
    async with GenerateClient(address) as client:
        prompt = random_prompt(20)
        async for _ in client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, request_id=request_id):
            pass


async def _check(address: str, request_id: str, ingress: str) -> None:
    text = await _explain(address, request_id)
    assert f"request {request_id}" in text
    assert f"at {ingress} since" in text
    assert "20 prompt tokens, 4 output tokens, ended after" in text
    assert "attempt 1" in text
    assert "what the engines reported" in text
    assert "did not answer" not in text


async def _explain(address: str, request_id: str) -> str:
    output = StringIO()
    console = Console(file=output, width=200)
    await show_explanation(address, console, Asked(request_id), timeout_s=30.0)
    return output.getvalue()
