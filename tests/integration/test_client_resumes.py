"""A request's answer is the same when the ingress that streams it dies, whatever it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest

from cluster.api.grpc.conversions.generate import response_to_proto
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import GenerateClient
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from tests.cluster.serving_setup import make_ingress_server
from tests.integration.promises import CUT, Expected, engines_config, expected_answers, text_of, token_ids_of
from tests.integration.recovering_cluster import recovering_cluster

_TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Expected:
    return expected_answers(checkpoint("llama"))


def _message(request: GenerateRequest) -> generate_pb2.GenerateRequest:
    assert isinstance(request.prompt, TokenPrompt)
    sampling = {name: value for name, value in asdict(request.sampling).items() if value is not None}
    return generate_pb2.GenerateRequest(
        request_id=request.request_id,
        token_ids=generate_pb2.TokenIds(ids=request.prompt.token_ids),
        sampling_params=generate_pb2.SamplingParams(**sampling),
        output_token_ids=request.output_token_ids,
        cache_salt=request.cache_salt,
    )


async def _stream(client: GenerateClient, request: GenerateRequest) -> list[generate_pb2.GenerateResponse]:
    async with asyncio.timeout(_TIMEOUT_S), aclosing(client.send(_message(request))) as responses:
        return [response async for response in responses]


@pytest.mark.parametrize("position", [1, CUT])
async def test_an_answer_is_the_same_when_its_ingress_dies(position: int, expected: Expected) -> None:
    requests, answers = expected.requests, expected.answers
    num_requests = sum(len(token_ids_of(answer)) > position for answer in answers.values())
    async with recovering_cluster(engines_config(expected.directory), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        cluster.tap.close(["decode-0"], position, num_requests)
        async with cluster.another_serving() as other_serving:
            first, second = make_ingress_server(cluster.serving), make_ingress_server(other_serving)
            addresses = [f"127.0.0.1:{await server.start()}" for server in (first, second)]
            async with GenerateClient(addresses) as client, asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                streams = {name: tasks.create_task(_stream(client, request)) for name, request in requests.items()}
                await cluster.tap.has_stopped.wait()
                await first.drain(grace_s=0)
                await cluster.pool.close()
            for name, stream in streams.items():
                _assert_same(name, stream.result(), answers[name])
            await second.drain(grace_s=0)
        await cluster.until_idle()


def _assert_same(name: str, stream: list[generate_pb2.GenerateResponse], expected: list[GenerateChunk]) -> None:
    assert (name, [token_id for response in stream for token_id in response.token_ids]) == (
        name,
        token_ids_of(expected),
    )
    assert (name, "".join(response.text for response in stream)) == (name, text_of(expected))
    positions = [response.first_position for response in stream if response.token_ids]
    assert positions == [chunk.first_position for chunk in expected if chunk.token_ids], name
    assert [response.HasField("seed") for response in stream] == [True, *[False] * (len(stream) - 1)]
    assert {response.request_id for response in stream} == {name}
    ours = [logprobs for response in stream for logprobs in response.logprobs]
    theirs = [logprobs for chunk in expected for logprobs in response_to_proto(name, chunk).logprobs]
    assert [one.rank for one in ours] == [one.rank for one in theirs], name
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4), name
    assert [[top.token_id for top in one.top] for one in ours] == [[top.token_id for top in one.top] for one in theirs]
    end, expected_end = stream[-1], response_to_proto(name, expected[-1])
    assert end.finish_reason == expected_end.finish_reason
    assert (end.stop_string, end.stop_token_id) == (expected_end.stop_string, expected_end.stop_token_id)
    assert end.usage.prompt_tokens == expected_end.usage.prompt_tokens
    assert (name, end.usage.output_tokens) == (name, expected_end.usage.output_tokens)
