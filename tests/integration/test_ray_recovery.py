"""A decode engine is killed in a cluster as `raypd serve` starts it: its requests go on elsewhere, token for token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.client import GenerateClient
from tests.integration.served import ServeProcess, process_listening_at
from tests.patience import TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]

_NUM_TOKENS = 100
_NUM_REQUESTS = 8


@pytest.fixture
def served(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[ServeProcess, str]]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "decode": {"count": 2, "num_cpus": 0.5},
    }
    process = ServeProcess(config, tmp_path)
    try:
        yield process, process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


def process_of(served: ServeProcess, engine_id: str) -> psutil.Process:
    """The process that listens where an engine said that it does."""
    [address] = [found.group(1) for line in served.lines if (found := re.search(rf"{engine_id}: .* at (\S+)", line))]
    return process_listening_at(int(address.rpartition(":")[2]))


async def test_no_token_is_lost_or_changed_when_a_decode_engine_is_killed(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    victim = process_of(served[0], "decode-0")
    prompts = [random_prompt(20 + 7 * index, seed=index) for index in range(_NUM_REQUESTS)]
    progress = asyncio.Semaphore(0)
    may_go_on = asyncio.Event()

    async def ask(client: GenerateClient, prompt: list[int]) -> list[int]:
        token_ids: list[int] = []
        async for response in client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True):
            token_ids.extend(response.token_ids)
            if len(token_ids) >= 3 and not may_go_on.is_set():
                progress.release()
                await may_go_on.wait()
        return token_ids

    async with GenerateClient(served[1]) as client, asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(ask(client, prompt)) for prompt in prompts]
        for _ in prompts:
            await progress.acquire()
        victim.kill()
        may_go_on.set()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.result() == greedy_tokens(checkpoint("llama"), tuple(prompt), _NUM_TOKENS)
