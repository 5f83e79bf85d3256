import asyncio

import pytest

from actors.core.request import FinishReason
from cluster.client import CallFailed, GenerateClient
from tests.cluster.serving_setup import make_ingress_server, make_pair


async def test_a_prompt_can_be_tokens_or_a_conversation() -> None:
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    async with GenerateClient(f"127.0.0.1:{await server.start()}") as client:
        reading = asyncio.ensure_future(anext(client.generate([104, 105], max_tokens=1)))
        producer, _ = await pair.next_requests()
        pair.prefill.send(producer, 0, "!", finish_reason=FinishReason.LENGTH)
        assert (await reading).text == "!"
        assert producer.prompt_token_ids == [104, 105]

        with pytest.raises(CallFailed) as raised:
            await anext(client.generate([("user", "hi")]))
        assert "no chat template" in raised.value.violations["chat"]
    await server.drain(grace_s=0)


async def test_an_ingress_that_is_not_there_is_unavailable() -> None:
    async with GenerateClient("127.0.0.1:1") as client:
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await anext(client.generate("hello"))


async def test_an_unknown_parameter_is_a_mistake_of_the_program() -> None:
    async with GenerateClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="temprature"):
            await anext(client.generate("hello", temprature=1.0))  # type: ignore[call-arg]  # it is the mistake


async def test_a_client_that_was_not_opened_says_so() -> None:
    with pytest.raises(RuntimeError, match="use `async with`"):
        await GenerateClient("127.0.0.1:1").status()


async def test_text_becomes_tokens_and_tokens_text() -> None:
    server = make_ingress_server(make_pair().serving)
    async with GenerateClient(f"127.0.0.1:{await server.start()}") as client:
        assert await client.tokenize("hé") == list("hé".encode())
        assert await client.detokenize(list(b"ok")) == "ok"
        assert [model.model for model in await client.list_models()] == [(await client.get_model()).model]
        with pytest.raises(CallFailed, match="no chat template"):
            await client.tokenize([("user", "hi")])
    await server.drain(grace_s=0)
