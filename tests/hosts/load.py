"""Requests all the time, several at once, every answer compared with transformers' own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import GenerateClient
from tests.reference import greedy_tokens, random_prompt

NUM_TOKENS: Final = 300
NUM_WORKERS: Final = 6
_REQUEST_TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class Load:
    """The figures of a load so far. pauses_s: the longest silence within each answer; first_token_s: of each answer."""

    pauses_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    _has_more: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, num_tokens: int) -> None:
        """So many tokens have come."""
        self.num_tokens += num_tokens
        self._has_more.set()

    async def flows(self, num_tokens: int) -> None:
        """Wait until so many more tokens have come."""
        wanted = self.num_tokens + num_tokens
        while self.num_tokens < wanted:
            self._has_more.clear()
            await self._has_more.wait()

    def report(self) -> str:
        """One line."""
        return (
            f"{len(self.pauses_s)} answers, longest pause {max(self.pauses_s):.2f} s, "
            f"latest first token {max(self.first_token_s):.2f} s"
        )


@asynccontextmanager
async def load(client: GenerateClient, directory: Path) -> AsyncIterator[Load]:
    """Ask on until the block's end; then every answer has been right, each position once, and none has failed."""
    seen, is_over = Load(), asyncio.Event()
    prompts = [random_prompt(20 + 17 * worker, seed=worker) for worker in range(NUM_WORKERS)]
    answers = [greedy_tokens(directory, tuple(prompt), NUM_TOKENS) for prompt in prompts]

    async def ask_on(prompt: list[int], answer: list[int]) -> None:
        while True:
            assert await _ask(client, prompt, seen) == answer
            if is_over.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        for prompt, answer in zip(prompts, answers, strict=True):
            tasks.create_task(ask_on(prompt, answer))
        try:
            yield seen
        finally:
            is_over.set()


async def _ask(client: GenerateClient, prompt: list[int], seen: Load) -> list[int]:
    clock = asyncio.get_running_loop().time
    token_ids: list[int] = []
    gaps_s: list[float] = []
    last_s = clock()
    # A salt of its own: the KV of every prompt has to travel. Not resumed: it is the cluster that must keep a stream.
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=prompt),
        sampling_params=generate_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        cache_salt=uuid.uuid4().hex,
    )
    async for response in client.send(request, _REQUEST_TIMEOUT_S, resume=False):
        assert response.first_position == len(token_ids), "a position was told twice, or left out"
        token_ids.extend(response.token_ids)
        gaps_s.append(clock() - last_s)
        last_s = clock()
        seen.add(len(response.token_ids))
    seen.first_token_s.append(gaps_s[0])
    seen.pauses_s.append(max(gaps_s[1:]))
    return token_ids
