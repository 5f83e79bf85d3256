import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.core.request import FinishReason
from cluster.client import CallFailed, GenerateClient, generate_blocking
from tests.cluster.serving_setup import Pair, make_ingress_server, make_pair


@contextmanager
def _ingress_on_a_thread() -> Iterator[str]:
    """An ingress whose engines answer every request with "ab", on an event loop of its own."""
    addresses: list[str] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        pair = make_pair()
        server = make_ingress_server(pair.serving)
        addresses.append(f"127.0.0.1:{await server.start()}")
        answering = asyncio.create_task(_answer_all(pair))
        is_up.set()
        await asyncio.to_thread(is_over.wait, 60)
        answering.cancel()
        await server.drain(grace_s=0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert is_up.wait(timeout=10)
    try:
        yield addresses[0]
    finally:
        is_over.set()
        thread.join(timeout=10)


async def _answer_all(pair: Pair) -> None:
    while True:
        producer, consumer = await pair.next_requests()
        pair.prefill.send(producer, 0, "a", handed_over=True)
        pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)


def test_a_program_without_an_event_loop_streams_an_answer() -> None:
    with _ingress_on_a_thread() as address:
        assert [response.text for response in generate_blocking(address, "hello", max_tokens=2)] == ["a", "b"]


def test_a_program_without_an_event_loop_may_stop_early() -> None:
    with _ingress_on_a_thread() as address:
        responses = generate_blocking(address, "hello")
        assert next(responses).text == "a"
        responses.close()


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
            await anext(client.generate("hello", temprature=1.0))
