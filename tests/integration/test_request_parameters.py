"""Further parameters of vLLM at a running cluster, through both APIs: what P begins D completes under these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.client import GenerateClient
from tests.checkpoints import MAX_POSITIONS
from tests.cluster.serving_setup import make_ingress_server
from tests.integration.test_http_api import served
from tests.integration.test_leaks import until_idle
from tests.reference import greedy_tokens, random_prompt
from tests.token_rules import ALLOWED, ruled_tokens, words_in

pytestmark = pytest.mark.timeout(120)

CheckpointOf = Callable[[str], Path]
PROMPT = random_prompt(30)
NUM_TOKENS = 24


async def ask_both_apis(directory: Path, parameters: dict[str, Any], prompt: str | list[int] = PROMPT) -> list[int]:
    """The same request over HTTP and over gRPC, whose answers must be equal."""
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **parameters}
    async with served(directory) as (cluster, openai), asyncio.timeout(60):
        extra = {**asked, "return_token_ids": True}
        completion = await openai.completions.create(model="test", prompt=prompt, extra_body=extra)
        over_http: list[int] = (completion.choices[0].model_extra or {})["token_ids"]
        server = make_ingress_server(cluster.serving)
        port = await server.start()
        try:
            async with GenerateClient(f"127.0.0.1:{port}") as client:
                over_grpc = [token async for chunk in client.generate(prompt, **asked) for token in chunk.token_ids]
        finally:
            await server.drain(grace_s=0)
        for name, stats in (await until_idle(cluster)).items():
            assert stats.num_output_tokens > 0, f"{name} had no part in it"
    assert over_grpc == over_http
    return over_http


async def test_only_allowed_tokens_come(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")

    tokens = await ask_both_apis(directory, {"allowed_token_ids": list(ALLOWED)})

    assert tokens == ruled_tokens(directory, PROMPT, NUM_TOKENS, ALLOWED)


async def test_no_bad_word_comes(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    plain = greedy_tokens(directory, tuple(PROMPT), NUM_TOKENS)
    words = words_in(directory, plain)

    tokens = await ask_both_apis(directory, {"bad_words": list(words.words)})

    assert tokens == ruled_tokens(directory, PROMPT, NUM_TOKENS, bad_words=words.token_ids)
    assert tokens != plain


@pytest.mark.parametrize("num_taken", [9, -1])
async def test_the_last_tokens_of_a_prompt_are_taken(num_taken: int, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    prompt = random_prompt(1000)
    left = prompt[-num_taken:] if num_taken > 0 else prompt[-(MAX_POSITIONS - NUM_TOKENS) :]

    tokens = await ask_both_apis(directory, {"truncate_prompt_tokens": num_taken}, prompt)

    assert tokens == greedy_tokens(directory, tuple(left), NUM_TOKENS)
