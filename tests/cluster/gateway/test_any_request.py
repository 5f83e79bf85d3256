"""Whatever is sent: answers are as the OpenAPI document says, none is a server's error, and nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from actors.core.outputs import TokenLogprobs
from actors.core.request import EngineCoreRequest, FinishReason
from actors.pooling_facts import PoolingFacts
from cluster.gateway.config import HttpConfig
from cluster.gateway.gateway import OPERATIONS
from cluster.gateway.openapi import openapi
from tests.cluster.gateway.gateway_setup import Setup, gateway_setup
from tests.cluster.serving_setup import assert_nothing_is_left
from tests.fakes import FakeEngine

pytestmark = pytest.mark.timeout(300)


def no_fault(context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]) -> None:
    """None of the server's, that is: times that cannot be met are asked for, too."""
    if response.status_code != 504:
        not_a_server_error(context, response, case)


_CONFIG = HttpConfig(tool_parser="hermes", reasoning_parser="qwen3", max_body_bytes=100_000)
_CHECKS = [
    no_fault,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
DOCUMENT = schemathesis.openapi.from_dict(openapi(OPERATIONS))
"""Schemathesis makes what covers it where tests are collected, in seconds; so at random, further ones are without."""
AT_RANDOM = schemathesis.openapi.from_dict(
    openapi(OPERATIONS), config=schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
)
_ANSWER = '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>[{"name": "f"}]'


@asynccontextmanager
async def answering() -> AsyncIterator[Setup]:
    """A door whose engines answer at once."""

    async def answer(engine: FakeEngine) -> None:
        while True:
            with suppress(TimeoutError):  # nobody asks
                _answer(engine, await engine.next_request())

    async with gateway_setup(_CONFIG, pooling=PoolingFacts(embedding_size=4)) as setup, asyncio.TaskGroup() as tasks:
        engines = [tasks.create_task(answer(engine)) for engine in (setup.pair.prefill, setup.pair.decode)]
        yield setup
        for task in engines:
            task.cancel()


def _answer(engine: FakeEngine, request: EngineCoreRequest) -> None:
    if request.pooling_params is not None:
        engine.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[0.0, 0.6, 0.8, 0.0])
        return
    token_ids = list(_ANSWER.encode())[: request.sampling_params.max_tokens]
    num_logprobs = request.sampling_params.logprobs
    logprobs = None
    if num_logprobs is not None:
        logprobs = [TokenLogprobs([token, *range(num_logprobs)], [-0.5] * (num_logprobs + 1), 1) for token in token_ids]
    prompt_logprobs = None
    if (num_top := request.sampling_params.prompt_logprobs) is not None:
        each = TokenLogprobs([65, *range(num_top)], [-0.5] * (num_top + 1), 1)
        prompt_logprobs = [each] * (len(request.prompt_token_ids) - 1)
    reason = FinishReason.LENGTH
    engine.send(request, 0, token_ids, finish_reason=reason, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a door on a thread of its own: schemathesis blocks."""
    address: Future[str] = Future()
    is_over = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with answering() as setup:
            address.set_result(f"http://127.0.0.1:{setup.port}")
            await is_over.wait()
            assert_nothing_is_left(setup.pair)

    running = asyncio.run_coroutine_threadsafe(serve(), loop)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield address.result(timeout=30)
    finally:
        loop.call_soon_threadsafe(is_over.set)
        running.result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@hypothesis.settings(max_examples=3, derandomize=True)
@DOCUMENT.parametrize()
def test_any_request_is_answered_as_the_document_says(case: schemathesis.Case[Any], url: str) -> None:
    case.call_and_validate(base_url=url, checks=_CHECKS)


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@AT_RANDOM.exclude(path="/tokenize").parametrize()  # of which schemathesis cannot make so many wrong bodies
def test_many_requests_are_answered_as_the_document_says(case: schemathesis.Case[Any], url: str) -> None:
    case.call_and_validate(base_url=url, checks=_CHECKS)


async def test_the_document_is_there_and_so_is_its_page() -> None:
    async with gateway_setup() as setup:
        document = (await setup.http.get("/openapi.json")).json()
        assert document == openapi(OPERATIONS)
        for schema in document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        page = (await setup.http.get("/docs")).text
    for word in ("/v1/chat/completions", "response_format", "list of integer"):
        assert word in page
