"""A request that kills every engine that computes it: what its client is told, and what everybody else sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from cluster.client import CallFailed, GenerateClient
from kv_transfer.config import KVTransferConfig
from tests.cluster.serving_setup import make_ingress_server
from tests.engine_pair import engine_config
from tests.integration.recovering_cluster import recovering_cluster
from tests.reference import greedy_tokens, random_prompt

_NUM_TOKENS = 24
_POISON = 1


async def _stream(client: GenerateClient, prompt: list[int], has_begun: asyncio.Event) -> list[int]:
    token_ids: list[int] = []
    answer = client.generate(prompt, temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    async with aclosing(answer) as responses:
        async for response in responses:
            token_ids += response.token_ids
            has_begun.set()
    return token_ids


async def test_poison_takes_two_engines_with_it_and_no_other_request(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory, block_size=8, transfer=KVTransferConfig(transport="tcp"))
    engine_ids = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    prompts = [random_prompt(30, seed=seed) for seed in range(6)]
    async with recovering_cluster(config, engine_ids) as cluster:
        await cluster.join(*engine_ids)
        for barrier in cluster.barriers.values():
            barrier.poison = _POISON
        server = make_ingress_server(cluster.serving)
        async with GenerateClient(f"127.0.0.1:{await server.start()}") as client, asyncio.TaskGroup() as tasks:
            begun = [asyncio.Event() for _ in prompts]
            answers = [
                tasks.create_task(_stream(client, prompt, event)) for prompt, event in zip(prompts, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            with pytest.raises(CallFailed, match=r"poison.*2 engines died with the request") as raised:
                await anext(client.generate([5, _POISON, 6], request_id="poison"))
            assert raised.value.code is grpc.StatusCode.INTERNAL
            for prompt, answer in zip(prompts, answers, strict=True):
                assert await answer == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
            dead = {engine_id for engine_id, engine in cluster.engines.items() if engine.error is not None}
            assert {engine_id.partition("-")[0] for engine_id in dead} == {"prefill", "decode"}
            assert len(dead) == 2
            after = await _stream(client, prompts[0] + [9], asyncio.Event())
            assert after == greedy_tokens(directory, (*prompts[0], 9), _NUM_TOKENS)
        await server.drain(0)
        for engine_id in dead:
            await cluster.engines.pop(engine_id).stop()
        await cluster.until_idle()
