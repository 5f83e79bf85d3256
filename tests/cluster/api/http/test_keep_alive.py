"""Streams that have nothing to say tell that they live."""

from __future__ import annotations

import asyncio

import openai
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import http_setup
from tests.cluster.serving_setup import assert_nothing_is_left

OFTEN = HttpConfig(keep_alive_interval_s=0.02)
BODY = {"prompt": "hello", "stream": True}


async def test_a_silent_stream_has_comments_between_its_events_and_none_within() -> None:
    async with http_setup(OFTEN) as setup:
        async with asyncio.timeout(60), setup.http.stream("POST", "/v1/completions", json=BODY) as answer:
            producer, consumer = await setup.pair.next_requests()
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2, "before the first token too"
            setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            while (line := await anext(lines)).startswith(":") or not line:
                pass
            assert '"text":"a"' in line
            assert [await anext(lines) for _ in range(3)] == ["", ": keep-alive", ""]
            setup.pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
            rest = [line async for line in lines if line and not line.startswith(":")]
        assert len(rest) == 2
        assert '"text":"b"' in rest[0]
        assert rest[1] == "data: [DONE]"
        assert_nothing_is_left(setup.pair)


async def test_openais_client_hears_nothing_of_them() -> None:
    async with http_setup(OFTEN) as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", stream=True))
        producer, consumer = await setup.pair.next_requests()
        async with asyncio.timeout(60), await asking as stream:  # it has begun, though nothing has come
            setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            setup.pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
            assert [choice.text async for chunk in stream for choice in chunk.choices] == ["a", "b"]


async def test_an_error_after_a_comment_is_an_event() -> None:
    async with http_setup(OFTEN) as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", stream=True))
        producer, consumer = await setup.pair.next_requests()
        async with asyncio.timeout(60), await asking as stream:
            for engine, request in ((setup.pair.prefill, producer), (setup.pair.decode, consumer)):
                engine.send(request, 0, [], finish_reason=FinishReason.ERROR, error="it broke")
            with pytest.raises(openai.APIError, match="it broke"):
                await anext(aiter(stream))
        assert_nothing_is_left(setup.pair)


async def test_a_client_that_leaves_a_silent_stream_aborts_its_request() -> None:
    async with http_setup(OFTEN) as setup:
        async with asyncio.timeout(60), setup.http.stream("POST", "/v1/completions", json=BODY) as answer:
            await setup.pair.next_requests()
            assert await anext(answer.aiter_lines()) == ": keep-alive"
        await asyncio.wait_for(setup.pair.prefill.has_aborted.wait(), timeout=60)
        await asyncio.wait_for(setup.pair.decode.has_aborted.wait(), timeout=60)
        assert_nothing_is_left(setup.pair)


async def test_streams_can_be_left_silent() -> None:
    async with http_setup(HttpConfig(keep_alive_interval_s=None)) as setup:
        asking = asyncio.create_task(setup.http.post("/v1/completions", json=BODY))
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        assert not any(line.startswith(":") for line in (await asking).text.splitlines())
