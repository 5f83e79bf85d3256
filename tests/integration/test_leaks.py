"""After a storm of requests and aborts nothing is left: no block, no task, no thread, no file descriptor."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.idle_engines import until_all_idle
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.timeout(180)

_NUM_REQUESTS = 300
_NUM_TOKENS = 12
_TIMEOUT_S = 60.0


async def _complete(cluster: LocalCluster, request_id: str, prompt: list[int]) -> list[int]:
    return [
        token_id
        async for chunk in cluster.serving.generate(_request(request_id, prompt, _NUM_TOKENS))
        for token_id in chunk.token_ids
    ]


async def _abort_after(cluster: LocalCluster, request_id: str, prompt: list[int], delay_s: float) -> None:
    """A client that leaves: before prefill, in the middle of it, during the transfer or while decoding."""
    try:
        async with (
            asyncio.timeout(delay_s),
            aclosing(cluster.serving.generate(_request(request_id, prompt, 300))) as chunks,
        ):
            async for _ in chunks:
                pass
    except TimeoutError:
        pass


def _request(request_id: str, prompt: list[int], max_tokens: int) -> GenerateRequest:
    sampling = SamplingOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt=TokenPrompt(prompt), sampling=sampling)


async def _storm(cluster: LocalCluster, directory: Path, num_requests: int, seed: int) -> int:
    """Returns how many were aborted. Every completed answer is checked."""
    rng = random.Random(seed)
    num_aborted = 0

    async def completed(request_id: str, prompt: list[int]) -> None:
        tokens = await _complete(cluster, request_id, prompt)
        assert tokens == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)

    async with asyncio.TaskGroup() as tasks:
        for index in range(num_requests):
            request_id = f"storm-{seed}-{index}"
            if index % 3 == 0:
                num_aborted += 1
                prompt = random_prompt(rng.randrange(100, 200), seed=index)
                tasks.create_task(_abort_after(cluster, request_id, prompt, rng.uniform(0.0, 0.4)))
            else:
                tasks.create_task(completed(request_id, random_prompt(rng.choice((5, 40, 90)), seed=index % 4)))
            await asyncio.sleep(rng.expovariate(100.0))
    return num_aborted


async def until_idle(cluster: LocalCluster) -> dict[str, SchedulerStats]:
    """Wait until nothing is left in any engine; returns what they have counted."""
    await until_all_idle(cluster.engines.values())
    return {name: engine.stats for name, engine in cluster.engines.items()}


def _footprint() -> dict[str, int]:
    return {
        "file descriptors": psutil.Process().num_fds(),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }


async def _until_as_small_as(before: dict[str, int]) -> None:
    """A heartbeat's timer or a closing call may live for a moment; what stays is a leak."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        grown = {name: (before[name], count) for name, count in _footprint().items() if count > before[name]}
        if not grown:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"grew: {grown}")


async def test_a_storm_of_requests_and_aborts_leaves_nothing_behind(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    config = engine_config(
        directory,
        block_size=8,
        num_blocks=400,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        # A fetch would open a link in the other direction, which stays.
        transfer=KVTransferConfig(transport="tcp", prefix_fetch=False),
    )
    async with local_cluster(config) as cluster:
        await _storm(cluster, directory, 20, seed=1)
        await until_idle(cluster)
        before = _footprint()
        num_aborted = await _storm(cluster, directory, _NUM_REQUESTS, seed=2)
        assert num_aborted == _NUM_REQUESTS // 3
        stats = await until_idle(cluster)
        assert stats["decode-0"].num_prompt_tokens_computed == 0
        assert stats["decode-0"].transfer_stats is not None
        assert stats["decode-0"].transfer_stats.num_active_transfers == 0
        await _until_as_small_as(before)
        for engine in cluster.engines.values():
            engine.check_integrity()
