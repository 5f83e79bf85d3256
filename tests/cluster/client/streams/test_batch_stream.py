"""Batches outlive the ingress that they come from, and their reader does not notice.

Tests of cluster/client/streams/batch_progress.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.api.protos.sample_seeds import sample_seed
from cluster.client import BlockingClient, CallFailed, GenerateClient
from tests.cluster.client.scripted_ingress import ScriptedIngress

_TIMEOUT_S = 60.0
PROMPTS = ["ab", "cd", "ef"]


def answer(request: generate_pb2.GenerateRequest) -> str:
    """Three characters of which one is of the seed."""
    return f"{request.text}{request.sampling_params.seed % 10}"


def expected(seed: int, n: int = 2) -> list[list[str]]:
    return [[f"{prompt}{sample_seed(seed, index) % 10}" for index in range(n)] for prompt in PROMPTS]


@pytest.fixture
def first() -> Iterator[ScriptedIngress]:
    with ScriptedIngress(answer).serving() as ingress:
        yield ingress


@pytest.fixture
def second() -> Iterator[ScriptedIngress]:
    with ScriptedIngress(answer).serving() as ingress:
        yield ingress


class Reader:
    """Reads a batch in a task of its own. options: generate_batch's"""

    def __init__(self, client: GenerateClient, **options: float | str) -> None:
        self.responses: list[generate_pb2.GenerateBatchResponse] = []
        self._task = asyncio.create_task(self._read(client, options))

    async def _read(self, client: GenerateClient, options: dict[str, Any]) -> None:
        async with asyncio.timeout(_TIMEOUT_S), aclosing(client.generate_batch(PROMPTS, n=2, **options)) as responses:
            async for response in responses:
                self.responses.append(response)

    async def to_the_end(self) -> list[generate_pb2.GenerateBatchResponse]:
        await self._task
        return self.responses

    async def until_killed(self, ingress: ScriptedIngress) -> None:
        """Kill it once what it wrote before it was held is read; what was not would be lost with it."""
        async with asyncio.timeout(_TIMEOUT_S):
            while len(self.responses) < (ingress.hold_after or 0):  # noqa: ASYNC110  # a task of its own appends
                await asyncio.sleep(0.002)
        await asyncio.to_thread(ingress.is_held.wait, _TIMEOUT_S)
        await asyncio.to_thread(ingress.kill)


def test_a_batch_is_whole_answers_by_prompt_and_sample(first: ScriptedIngress) -> None:
    with BlockingClient(first.address) as client:
        answers = client.complete_batch(PROMPTS, n=2, seed=7, max_tokens=3)
        streamed = list(client.generate_batch(PROMPTS, n=2, seed=7, max_tokens=3))
    assert [[one.text for one in of_prompt] for of_prompt in answers] == expected(7)
    assert [one.seed for one in answers[0]] == [7, sample_seed(7, 1)]
    assert len(streamed) == 18
    assert first.batches[0].each.sampling_params.max_tokens == 3


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("hold_after", range(18))
async def test_a_batch_that_is_cut_goes_on_elsewhere(
    first: ScriptedIngress, second: ScriptedIngress, hold_after: int, seed: int | None
) -> None:
    first.hold_after = hold_after
    async with GenerateClient([first.address, second.address]) as client:
        options = {} if seed is None else {"seed": seed}
        reader = Reader(client, request_id="mine", **options)
        await reader.until_killed(first)
        responses = await reader.to_the_end()
    texts: dict[tuple[int, int], str] = {}
    for one in responses:
        place = one.prompt_index, one.sample_index
        assert one.response.first_position == len(texts.get(place, ""))
        assert one.response.request_id == "mine"
        texts[place] = texts.get(place, "") + one.response.text
    assert [[texts[prompt, sample] for sample in range(2)] for prompt in range(3)] == expected(seed or 3)
    num_seeds = Counter((one.prompt_index, one.sample_index) for one in responses if one.response.HasField("seed"))
    assert set(num_seeds.values()) == {1}
    # What had begun is not asked for again, and prompts that had not are one call.
    resumed = {request.request_id for request in second.requests}
    assert len(resumed) == len(second.requests)
    assert len(second.batches) == (hold_after < 5)
    asked_again = sum(len(batch.prompts) for batch in second.batches)
    assert asked_again == (3 if hold_after == 0 else 3 - min(3, (hold_after + 1) // 2))


async def test_of_a_prompt_with_best_of_all_answers_come_from_one_call(
    first: ScriptedIngress, second: ScriptedIngress
) -> None:
    first.hold_after = 1  # the first prompt's second answer is not there yet
    async with GenerateClient([first.address, second.address]) as client:
        batch = client.complete_batch(PROMPTS, n=2, best_of=3)
        reading = asyncio.create_task(batch)
        await asyncio.to_thread(first.is_held.wait, _TIMEOUT_S)
        await asyncio.to_thread(first.kill)
        answers = await asyncio.wait_for(reading, _TIMEOUT_S)
    assert [[one.text for one in of_prompt] for of_prompt in answers] == expected(3)
    assert [[one.cumulative_logprob for one in of_prompt] for of_prompt in answers] == [[-1.0, -2.0]] * 3
    assert [len(batch.prompts) for batch in second.batches] == [3]
    assert not second.requests


async def test_a_full_ingress_is_asked_again_when_it_said(first: ScriptedIngress) -> None:
    first.num_refusals, first.retry_delay_s = 2, 0.1
    async with GenerateClient(first.address) as client:
        assert len(await Reader(client).to_the_end()) == 18
    assert len(first.batches) == 3


async def test_a_batch_that_may_not_be_repeated_is_not(first: ScriptedIngress) -> None:
    first.num_refusals = 1
    async with GenerateClient(first.address) as client:
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED"):
            await client.complete_batch(PROMPTS, resume=False)
    assert len(first.batches) == 1


async def test_a_part_that_fails_by_its_own_fault_ends_the_batch(
    first: ScriptedIngress, second: ScriptedIngress
) -> None:
    first.hold_after = 1
    async with GenerateClient([first.address, second.address]) as client:
        # The scripted ingress takes it in a batch, and refuses it in a call of its own.
        reader = Reader(client, top_p=7.0)
        await reader.until_killed(first)
        with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
            await reader.to_the_end()


async def test_one_prompt_is_no_batch(first: ScriptedIngress) -> None:
    async with GenerateClient(first.address) as client:
        with pytest.raises(TypeError, match="a batch has several prompts"):
            await client.complete_batch("ab")
