"""The planner of a cluster as `raypd serve` starts it changes an engine's role when the load shifts to prompts.

No request is lost, and every answer has all of its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from tests.integration.served import ServeProcess
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]

_NUM_CLIENTS = 12
_PROMPT_TOKENS, _OUTPUT_TOKENS = 200, 2


@pytest.fixture
def served(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[ServeProcess, str]]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 512, "enable_prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "routing": {"mode": "disaggregate"},
        "decode": {"count": 2, "num_cpus": 0.5},
        # An aim that a prompt engine misses once it is busy for most of the time.
        "slo": {"ttft_ms": 100},
        "planner": {
            "mode": "act",
            "interval_s": 2,
            "max_engines": 3,
            "prefill": {"min": 1},
            "decode": {"min": 1},
            "both": {"max": 0},
        },
    }
    process = ServeProcess(config, tmp_path)
    try:
        yield process, process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def test_a_decode_engine_prefills_once_prompts_are_most_of_the_load(served: tuple[ServeProcess, str]) -> None:
    num_tokens: list[int] = []
    has_changed = asyncio.Event()

    async def ask(client: GenerateClient, number: int) -> None:
        while not has_changed.is_set():
            prompt = random_prompt(_PROMPT_TOKENS, seed=number + _NUM_CLIENTS * len(num_tokens))
            answer = await client.complete(prompt, max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            num_tokens.append(len(answer.token_ids))

    async with GenerateClient(served[1]) as client, asyncio.timeout(CLUSTER_S), asyncio.TaskGroup() as tasks:
        for number in range(_NUM_CLIENTS):
            tasks.create_task(ask(client, number))
        status = await _status_after_change(client)
        has_changed.set()
    roles = {engine.engine_id: engine.role for engine in status.engines}
    assert sorted(roles.values()) == ["decode", "prefill", "prefill"], roles
    assert status.planner.reason
    assert any("let decode-" in one.text and "serve as prefill: the plan" in one.text for one in status.decisions)
    assert set(num_tokens) == {_OUTPUT_TOKENS}, "every answer is whole"


async def _status_after_change(client: GenerateClient) -> admin_pb2.GetStatusResponse:
    while True:
        status = await client.status(30.0)
        if any(engine.engine_id.startswith("decode") and engine.role == "prefill" for engine in status.engines):
            return status
        await asyncio.sleep(0.5)
