import asyncio
import gc

import psutil
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
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


@pytest.mark.parametrize("ending", ["read", "left", "cancelled"])
async def test_a_closed_client_leaves_no_connection_behind(ending: str) -> None:
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    port = await server.start()
    gc.disable()  # Whatever waits for it stays connected for as long as a program is idle.
    try:
        async with asyncio.timeout(60):
            async with GenerateClient(f"127.0.0.1:{port}") as client:
                answer = client.generate("hello")
                reading = asyncio.ensure_future(anext(answer))
                producer, consumer = await pair.next_requests()
                assert _num_connections(port) == 1
                if ending == "cancelled":
                    reading.cancel()
                    await asyncio.wait([reading])
                    del reading  # A cancelled task keeps its exception, and so the call.
                else:
                    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
                    assert (await reading).text == "a"
                if ending == "read":
                    pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
                    assert [response.text async for response in answer] == ["b"]
                await answer.aclose()
            while _num_connections(port):  # noqa: ASYNC110  # a socket of gRPC's has no event
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await server.drain(0)


def _num_connections(port: int) -> int:
    """Count this process's connections to the port whose client's end is open."""
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(1 for one in connections if one.raddr and one.raddr.port == port and one.status == "ESTABLISHED")
