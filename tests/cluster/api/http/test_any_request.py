"""Answers to random requests are as the OpenAPI document says, none is a server's error, and nothing is left.

Tests of cluster/api/http/openapi.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import jsonschema
import pytest

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.api.http.handlers import OPERATIONS
from cluster.api.http.openapi import openapi
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.serving_setup import assert_nothing_is_left
from tests.fakes import FakeEngine

pytestmark = pytest.mark.timeout(330)

_TIMEOUT_S: Final = 300


_CONFIG = HttpConfig(tool_parser="hermes", reasoning_parser="qwen3", max_body_bytes=100_000)
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
_SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]  # times that cannot be met are asked for, too
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 413, 415, 422, 504]  # lists that are too long make bodies too large
"""
_ANSWER = '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>[{"name": "f"}]'


@asynccontextmanager
async def answering(config: HttpConfig = _CONFIG) -> AsyncIterator[Setup]:
    """A server whose engines answer at once."""

    async def answer(engine: FakeEngine) -> None:
        while True:
            with suppress(TimeoutError):  # nobody asks
                _answer(engine, await engine.next_request())

    async with http_setup(config, pooling=PoolingFacts(embedding_size=4)) as setup, asyncio.TaskGroup() as tasks:
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
    """The server runs on a thread of its own: schemathesis blocks."""
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
        yield address.result(timeout=60)
    finally:
        loop.call_soon_threadsafe(is_over.set)
        running.result(timeout=60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check_answers(url: str, directory: Path, num_operations: int, *arguments: str) -> None:
    """By schemathesis as a command. As pytest's plugin it makes its cases where tests are collected, in seconds."""
    settings = directory / "schemathesis.toml"
    settings.write_text(_SETTINGS)
    command = [str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(settings), "run"]
    result = subprocess.run(
        [*command, f"{url}/openapi.json", "--checks", ",".join(_CHECKS), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Tested: {num_operations}\n" in result.stdout, result.stdout


@pytest.mark.more
def test_any_request_is_answered_as_the_document_says(url: str, tmp_path: Path) -> None:
    few = ("--phases", "coverage,fuzzing", "--max-examples", "3", "--generation-deterministic")
    check_answers(url, tmp_path, len(OPERATIONS), *few)


@pytest.mark.slow
def test_many_requests_are_answered_as_the_document_says(url: str, tmp_path: Path) -> None:
    many = ("--phases", "fuzzing", "--max-examples", "200")
    # For which schemathesis cannot make so many wrong bodies.
    check_answers(url, tmp_path, len(OPERATIONS) - 1, *many, "--exclude-path", "/tokenize")


async def test_the_document_is_there_and_so_is_its_page() -> None:
    async with http_setup() as setup:
        document = (await setup.http.get("/openapi.json")).json()
        assert document == openapi(OPERATIONS)
        for schema in document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        page = (await setup.http.get("/docs")).text
    for word in ("/v1/chat/completions", "response_format", "list of integer"):
        assert word in page
