"""How long a client will wait travels with its request, as a deadline does over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.loop_time import let_pass
from tests.cluster.serving_setup import assert_nothing_is_left


def _time_given(request: EngineCoreRequest) -> float:
    assert request.deadline_s is not None
    return request.deadline_s - request.arrival_time_s


@pytest.mark.parametrize(
    ("body", "headers", "timeout_s"),
    [
        ({"timeout": 50}, {}, 50),
        ({}, {"x-request-timeout": "50"}, 50),
        ({"timeout": 90.5}, {"x-request-timeout": "50"}, 50),
        ({"timeout": 50}, {"x-request-timeout": "90.5"}, 50),
    ],
)
async def test_the_lesser_time_travels_to_both_engines(
    body: dict[str, Any], headers: dict[str, str], timeout_s: float
) -> None:
    async with http_setup() as setup:
        for ask in (_complete, _chat):
            asking = asyncio.create_task(ask(setup, body, headers))
            producer, consumer = await setup.pair.next_requests()
            for request in (producer, consumer):
                assert timeout_s - 20 < _time_given(request) <= timeout_s, "counted from the call's arrival"
            setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
            await asking


async def _complete(setup: Setup, body: dict[str, Any], headers: dict[str, str]) -> None:
    await setup.client.completions.create(model="tiny", prompt="hello", extra_body=body, extra_headers=headers)


async def _chat(setup: Setup, body: dict[str, Any], headers: dict[str, str]) -> None:
    await setup.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body=body, extra_headers=headers
    )


async def test_without_one_there_is_none() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(_complete(setup, {}, {}))
        producer, _ = await setup.pair.next_requests()
        assert producer.deadline_s is None
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        await asking


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_that_passes_is_a_504_that_is_not_retried(is_stream: bool) -> None:
    async with http_setup() as setup:
        client = setup.client.with_options(max_retries=2)
        asking = asyncio.create_task(
            client.completions.create(model="tiny", prompt="hello", stream=is_stream, extra_body={"timeout": 10})
        )
        producer, consumer = await setup.pair.next_requests()
        let_pass(10.0)
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert setup.pair.prefill.aborted == [producer.request_id]
        assert setup.pair.decode.aborted == [consumer.request_id]
        assert_nothing_is_left(setup.pair)


async def test_a_deadline_that_passes_within_a_stream_is_its_last_event() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", stream=True, extra_body={"timeout": 10})
        )
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        stream = aiter(await asking)
        assert (await anext(stream)).choices[0].text == "a"
        let_pass(10.0)
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "deadline_exceeded"
        await asyncio.wait_for(setup.pair.decode.has_aborted.wait(), timeout=60)
        assert_nothing_is_left(setup.pair)


async def test_vectors_have_deadlines_too() -> None:
    async with http_setup(pooling=PoolingFacts(embedding_size=4)) as setup:
        asking = asyncio.create_task(
            setup.client.embeddings.create(model="tiny", input="hello", extra_body={"timeout": 50})
        )
        request = await setup.pair.prefill.next_request()
        assert 30 < _time_given(request) <= 50
        setup.pair.prefill.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[0.0, 0.6, 0.8, 0.0])
        await asking


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"timeout": 0}, {}, "timeout"),
        ({"timeout": -1}, {}, "timeout"),
        ({"timeout": 1e300}, {}, "timeout"),
        ({"timeout": "5"}, {}, "timeout"),
        ({}, {"x-request-timeout": "0"}, "x-request-timeout"),
        ({}, {"x-request-timeout": "soon"}, "x-request-timeout"),
        ({}, {"x-request-timeout": "nan"}, "x-request-timeout"),
        ({}, {"x-request-timeout": "inf"}, "x-request-timeout"),
    ],
)
async def test_what_is_no_time_is_refused(body: dict[str, Any], headers: dict[str, str], param: str) -> None:
    async with http_setup() as setup:
        for ask in (_complete, _chat):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(setup, body, headers)
            assert caught.value.param == param
