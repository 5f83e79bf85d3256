"""The whole cluster, as `raypd serve` starts it: Ray actors, gRPC in, text out.

Tests of cluster/__main__.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import CallFailed, GenerateClient
from tests.integration.served import ROOT, ServeProcess, actor_processes, ask_processes, process_listening_at
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_NUM_TOKENS = 12


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


async def ask(client: GenerateClient, prompt: list[int]) -> tuple[list[int], generate_pb2.GenerateResponse]:
    token_ids: list[int] = []
    async for response in client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True):
        assert response.first_position == len(token_ids)
        token_ids.extend(response.token_ids)
    return token_ids, response


async def test_tokens_through_the_whole_cluster_equal_generate(served: str, directory: Path) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 16, 17, 48, 49, 130, 200)]
    async with GenerateClient(served) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    for prompt, (token_ids, last) in zip(prompts, answers, strict=True):
        assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
        assert last.finish_reason == generate_pb2.FINISH_REASON_LENGTH
        assert last.timings.decode_engine.computed_prompt_tokens == 0
        statuses = [change.status for change in last.timings.decode_engine.status_changes]
        assert generate_pb2.REQUEST_STATUS_WAITING_FOR_REMOTE_KVS in statuses
        assert last.timings.transfer.kv_bytes > 0


def test_workers_of_a_cluster_of_our_own_yield_to_nobody(served: str) -> None:
    asked = ask_processes(lambda one: (one.name(), one.nice()))
    workers = [answer for _, answer in asked if answer[0].startswith("ray::")]

    names = {name for name, _ in workers}

    assert names >= {f"ray::{actor}" for actor in ("Controller", "IngressActor")}, names
    assert {niceness for _, niceness in workers} == {os.nice(0)}, "as nice as whoever has started them"


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ("Controller", r"Z INFO cluster\.pool\.journal decided decision=\"open ingress 0, "),
        ("EngineActor", r"Z INFO actors\.engine_server engine .* engine_id=(prefill|decode)-0\n"),
    ],
)
def test_what_actors_log_has_its_fields(served: str, actor: str, said: str) -> None:
    """In the files that Ray keeps of what processes write to stderr."""
    logs = [Path(f"/proc/{one.pid}/fd/2").resolve().read_text() for one in actor_processes(actor)]
    assert logs
    assert all(re.search(said, log) for log in logs), logs


def test_an_ingress_has_not_loaded_torch(served: str) -> None:
    ingress = process_listening_at(int(served.rpartition(":")[2]))
    mapped = {one.path for one in ingress.memory_maps()}
    assert all(any(name in path for path in mapped) for name in ("tokenizers", "fastokens"))
    assert not any("torch" in path for path in mapped)


async def test_both_apis_give_the_same_tokens(served: str, serve_process: ServeProcess, directory: Path) -> None:
    prompt = random_prompt(60, seed=60)
    url = f"http://{serve_process.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=directory.name,
            prompt=prompt,
            max_tokens=_NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        choices = [chunk.choices[0] async for chunk in stream]
    token_ids = [token_id for choice in choices for token_id in (choice.model_extra or {})["token_ids"]]
    assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)


async def test_health_says_serving(served: str) -> None:
    async with grpc.aio.insecure_channel(served) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs lack the methods
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_status_shows_engines_links_and_decisions(served: str) -> None:
    async with GenerateClient(served) as client:
        await ask(client, random_prompt(60, seed=77))
        async with asyncio.timeout(CLUSTER_S):
            # Counters come with the engines' next heartbeat.
            while True:
                status = await client.status()
                engines = {engine.engine_id: engine for engine in status.engines}
                is_over = all(engine.transfers.active == 0 and engine.links for engine in engines.values())
                sent = engines["prefill-0"].transfers.sent_bytes
                if is_over and 0 < sent == engines["decode-0"].transfers.received_bytes:
                    break
                await asyncio.sleep(0.1)
    assert status.controller_error == ""
    assert {engine.state for engine in status.engines} == {"ready"}
    assert engines["decode-0"].transfers.mean_transfer_seconds > 0
    assert [link.peer_engine_id for link in engines["decode-0"].links] == ["prefill-0"]
    assert {engine.kv_transport for engine in status.engines} == {"tcp"}
    assert {link.state for engine in status.engines for link in engine.links} == {"open"}
    assert any("prefill-0" in decision.text and "serve" in decision.text for decision in status.decisions)


def run(command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """To its end, with what it printed."""
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CLUSTER_S
    )


def test_status_is_a_command(served: str) -> None:
    command = [sys.executable, "-m", "cluster", "status", "--address", served]
    environment = os.environ | {"COLUMNS": "250"}
    shown = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CLUSTER_S
    )
    assert shown.returncode == 0, shown.stderr
    for word in ("prefill-0", "decode-0", "ready", "links", "KV transfers", "decisions"):
        assert word in shown.stdout, shown.stdout
    assert not shown.stderr
    machine = subprocess.run(
        [*command, "--json"], check=True, cwd=ROOT, capture_output=True, text=True, timeout=CLUSTER_S
    )
    assert len(json.loads(machine.stdout)["engines"]) == 2


def test_status_of_nobody_is_an_error_in_words() -> None:
    command = [sys.executable, "-m", "cluster", "status", "--address", "127.0.0.1:9", "--timeout", "2"]
    shown = run(command)
    assert shown.returncode == 1
    assert shown.stderr.startswith("raypd: ")
    assert "Traceback" not in shown.stderr


async def test_bad_input_is_named(served: str) -> None:
    async with GenerateClient(served) as client:
        with pytest.raises(CallFailed) as caught:
            async for _ in client.generate("hello", max_tokens=-1):
                pass
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(caught.value.violations) == ["sampling_params.max_tokens"]


async def test_text_comes_back_for_text_and_for_chat(served: str) -> None:
    async with GenerateClient(served) as client:
        for prompt in ("A serving engine reads", [("user", "Öl?")]):
            texts = [response.text async for response in client.generate(prompt, max_tokens=8, seed=3)]
            assert "".join(texts)


async def test_a_hundred_requests_of_which_a_third_is_cancelled_leave_the_rest_alone(
    served: str, directory: Path
) -> None:
    async def cancelled(client: GenerateClient, index: int) -> None:
        stream = client.generate(random_prompt(100, seed=index), max_tokens=200, temperature=0.0, ignore_eos=True)
        for _ in range(index % 4):
            await anext(stream)
        await stream.aclose()

    async def completed(client: GenerateClient, index: int) -> None:
        prompt = random_prompt(20 + index % 60, seed=index % 8)
        token_ids, _ = await ask(client, prompt)
        assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)

    async with GenerateClient(served) as client, asyncio.TaskGroup() as tasks:
        for index in range(100):
            tasks.create_task(cancelled(client, index) if index % 3 == 0 else completed(client, index))
