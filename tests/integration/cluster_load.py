"""Load on a running cluster, and waiting for what its status shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from tests.patience import CLUSTER_S
from tests.reference import greedy_tokens, random_prompt

_NUM_TOKENS = 40
_NUM_WORKERS = 3
_PAUSE_S = 0.3


async def ask_and_check(client: GenerateClient, directory: Path, worker: int) -> None:
    """One request, whose every token has to be right."""
    prompt = random_prompt(20 + 11 * worker, seed=worker)
    token_ids: list[int] = []
    async for response in client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True):
        assert response.first_position == len(token_ids)
        token_ids.extend(response.token_ids)
    assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)


@asynccontextmanager
async def load(client: GenerateClient, directory: Path) -> AsyncIterator[None]:
    """Requests all the time; at the end every answer has been right. Most of the machine is left to what changes."""
    is_over = asyncio.Event()

    async def ask_on(worker: int) -> int:
        count = 0
        while not is_over.is_set() or not count:
            await ask_and_check(client, directory, worker)
            count += 1
            await asyncio.sleep(_PAUSE_S)
        return count

    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(ask_on(worker)) for worker in range(_NUM_WORKERS)]
        yield
        is_over.set()
    assert all(worker.result() for worker in workers)


async def engines_become(client: GenerateClient, expected: set[tuple[str, int, str]]) -> admin_pb2.GetStatusResponse:
    """Wait until exactly these engines are ready, as (id, incarnation, role), and nothing else is there."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            status: admin_pb2.GetStatusResponse = await client.status()
            ready = {(e.engine_id, e.incarnation, e.role) for e in status.engines if e.state == "ready"}
            if ready == expected and len(status.engines) == len(expected):
                return status
            await asyncio.sleep(0.2)
