"""OpenAI's client at a running cluster: what P begins D completes, whichever API it came by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from actors.config import GrammarConfig
from cluster.settings.http import HttpConfig
from kv_transfer.config import KVTransferConfig
from tests.cluster.api.http.http_setup import http_server
from tests.engine_pair import engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.integration.test_leaks import until_idle
from tests.pooled import embedding_of
from tests.reference import greedy_tokens, logprobs_after, random_prompt
from tests.structured import compiling_in_process

pytestmark = pytest.mark.timeout(120)

CheckpointOf = Callable[[str], Path]
TEXT = "A serving engine reads prompts and builds a cache"
NUM_TOKENS = 24
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"up_to": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["up_to"],
        },
    },
}


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[LocalCluster, openai.AsyncOpenAI]]:
    config = engine_config(directory, block_size=8, transfer=KVTransferConfig(transport="tcp"))
    grammar = GrammarConfig(max_whitespace=1)
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"grammar": grammar})})
    async with (
        local_cluster(config) as cluster,
        http_server(cluster.serving, HttpConfig(tool_parser="hermes")) as (_, port),
        httpx2.AsyncClient(verify=False, timeout=60.0) as http,
    ):
        url = f"http://127.0.0.1:{port}/v1"
        yield cluster, openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


async def test_greedy_text_equals_generate_however_it_is_asked_for(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    expected = list(greedy_tokens(directory, tuple(prompt), NUM_TOKENS))
    asked: dict[str, Any] = {"model": "test", "max_tokens": NUM_TOKENS, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    async with served(directory) as (cluster, client), asyncio.timeout(60):
        whole = await client.completions.create(prompt=TEXT, extra_body=extra, n=2, **asked)
        assert [(choice.model_extra or {})["token_ids"] for choice in whole.choices] == [expected, expected]

        stream = await client.completions.create(prompt=prompt, extra_body=extra, stream=True, **asked)
        choices = [choice async for chunk in stream for choice in chunk.choices]
        assert [token for choice in choices for token in (choice.model_extra or {})["token_ids"]] == expected
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
        assert choices[-1].finish_reason == "length"

        chat = await client.chat.completions.create(
            messages=[{"role": "user", "content": "hi"}], extra_body=extra, **asked
        )
        rendered = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        expected_chat = list(greedy_tokens(directory, tuple(rendered.ids), NUM_TOKENS))
        assert (chat.choices[0].model_extra or {})["token_ids"] == expected_chat
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(rendered.ids)
        for name, stats in (await until_idle(cluster)).items():
            assert stats.num_free_blocks == stats.num_blocks, name
            assert stats.num_output_tokens > 0, f"{name} had no part in it"


async def test_an_echo_is_as_likely_as_transformers_finds_it(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    prompt = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    logits = logprobs_after(directory, tuple(prompt))
    expected = [logits[place - 1, token].item() for place, token in enumerate(prompt) if place]
    asked: dict[str, Any] = {"model": "test", "echo": True, "logprobs": 1, "max_tokens": 0}
    async with served(directory) as (_, client), asyncio.timeout(60):
        for given in (TEXT, prompt):
            [choice] = (await client.completions.create(prompt=given, **asked)).choices
            assert choice.text == TEXT
            assert choice.logprobs is not None
            first, *others = choice.logprobs.token_logprobs or []
            assert first is None
            assert others == pytest.approx(expected, abs=2e-4)


async def test_forced_calls_and_forms_are_json_that_their_schemas_accept(checkpoint: CheckpointOf) -> None:
    asked: dict[str, Any] = {"model": "test", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
    with compiling_in_process():
        async with served(checkpoint("llama")) as (_, client), asyncio.timeout(60):
            choices: list[Any] = ["required", {"type": "function", "function": {"name": "count"}}]
            for choice in choices:
                answer = await client.chat.completions.create(tools=[TOOL], tool_choice=choice, seed=1, **asked)
                [call] = (answer.choices[0].message.tool_calls or [])[:1]
                assert call.type == "function"
                assert 0 <= json.loads(call.function.arguments)["up_to"] <= 9

            schema = TOOL["function"]["parameters"]
            form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
            answer = await client.chat.completions.create(response_format=form, seed=1, **asked)
            assert 0 <= json.loads(answer.choices[0].message.content or "")["up_to"] <= 9

            auto = await client.chat.completions.create(tools=[TOOL], temperature=0, **asked)
            assert auto.choices[0].finish_reason in ("stop", "length"), "this model writes no calls"


async def test_embeddings_come_as_numbers_and_as_bytes(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    prompts = [random_prompt(12, seed=1), random_prompt(30, seed=2)]
    async with served(directory) as (_, client), asyncio.timeout(60):
        for encoding in ("float", "base64"):
            # OpenAI's client unpacks what it has asked for as bytes only by default; "base64" it leaves as it is.
            asked: Any = {} if encoding == "base64" else {"encoding_format": encoding}
            answer = await client.embeddings.create(
                model="test", input=prompts, extra_body={"pooling": "mean"}, **asked
            )
            assert [one.index for one in answer.data] == [0, 1]
            for prompt, one in zip(prompts, answer.data, strict=True):
                assert one.embedding == pytest.approx(embedding_of(directory, prompt, "mean"), abs=2e-5)
            assert answer.usage.prompt_tokens == 42
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="test", input=[])
        assert caught.value.param == "input"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_both_engines(checkpoint: CheckpointOf, is_stream: bool) -> None:
    extra = {"ignore_eos": True, "stream": is_stream}
    async with served(checkpoint("llama")) as (cluster, client), asyncio.timeout(60):
        asking = asyncio.create_task(
            client.completions.create(model="test", prompt=TEXT, max_tokens=450, extra_body=extra)
        )
        engines = cluster.engines.values()
        while not any(engine.stats.num_running_reqs for engine in engines):  # noqa: ASYNC110  # other threads
            await asyncio.sleep(0.001)
        asking.cancel()
        for name, stats in (await until_idle(cluster)).items():
            assert stats.num_free_blocks == stats.num_blocks, name
            assert stats.num_output_tokens < 450, f"{name} went on"
            cluster.engines[name].check_integrity()
