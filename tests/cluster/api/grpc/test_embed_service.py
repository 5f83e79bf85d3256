"""EmbedService as its client sees it, on fake engines.

Tests of cluster/api/grpc/conversions/embed.py, cluster/client/vector_options.py, cluster/api/grpc/list_lengths.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import PoolingParams
from cluster.api.protos.raypd.v1 import embed_pb2, embed_pb2_grpc, generate_pb2, model_pb2
from cluster.client import CallFailed, GenerateClient
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import make_ingress_server
from tests.cluster.vectors.vector_setup import CLASSIFIES, SCORES, Answering, answer, serving_of
from tests.fakes import FakeEngine


@asynccontextmanager
async def client_of(*servings: Serving) -> AsyncIterator[GenerateClient]:
    """A client of several ingresses, the first of which is asked first."""
    servers = [make_ingress_server(serving) for serving in servings]
    ports = [await server.start() for server in servers]
    try:
        async with GenerateClient([f"127.0.0.1:{port}" for port in ports]) as client:
            yield client
    finally:
        await asyncio.gather(*(server.drain(grace_s=0) for server in servers))


def prefill_engine() -> FakeEngine:
    return FakeEngine("p0", EngineRole.PREFILL)


async def test_inputs_of_every_kind_get_their_embeddings() -> None:
    prefill = prefill_engine()
    async with client_of(serving_of(prefill)) as client, Answering(prefill):
        response = await client.embed(
            ["hello", [1, 2, 3]], request_id="mine", pooling="cls", normalize=False, dimensions=1, timeout_s=20
        )
        assert response == embed_pb2.EmbedResponse(
            request_id="mine",
            embeddings=[embed_pb2.Embedding(values=[5, 0]), embed_pb2.Embedding(values=[3, 0])],
            usage=generate_pb2.Usage(prompt_tokens=8, cached_tokens=4),
            model_version=1,
        )
        assert prefill.submitted[0].pooling_params == PoolingParams(pooling="cls", normalize=False, dimensions=1)
        assert prefill.submitted[0].deadline_s is not None
        defaults = await client.embed("hello")
        assert prefill.submitted[-1].pooling_params == PoolingParams(pooling="mean")
        assert len(defaults.request_id) == 32


async def test_a_model_says_what_it_can_be_asked() -> None:
    async with client_of(serving_of(prefill_engine(), facts=CLASSIFIES)) as client:
        vectors = (await client.get_model()).vectors
        assert (vectors.embedding_size, list(vectors.labels)) == (0, ["bad", "good"])
    async with client_of(serving_of(prefill_engine())) as client:
        model = await client.get_model()
        assert model.generates
        assert model.vectors == model_pb2.VectorDescription(
            embedding_size=2, pooling=embed_pb2.POOLING_MEAN, normalize=True
        )


async def test_a_call_in_flight_is_seen() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill)
    async with client_of(serving) as client:
        embedding = asyncio.create_task(client.embed("hello", request_id="mine"))
        request = await prefill.next_request()
        [view] = serving.requests_in_flight()
        assert (view.request_id, view.phase, view.model_version) == ("mine", "prefill", 1)
        prefill.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[1.0, 0.0])
        await embedding


async def test_classes_are_named_and_the_best_one_is_said() -> None:
    prefill = prefill_engine()
    async with client_of(serving_of(prefill, facts=CLASSIFIES)) as client:
        classifying = asyncio.create_task(client.classify(["a", "b"], raw_logits=True))
        await answer(prefill, [0.25, 0.75])
        await answer(prefill, [2.0, -1.0])
        response = await classifying
    assert list(response.labels) == ["bad", "good"]
    assert [(list(one.scores), one.label) for one in response.classifications] == [
        ([0.25, 0.75], "good"),
        ([2.0, -1.0], "bad"),
    ]


async def test_documents_are_scored() -> None:
    prefill = prefill_engine()
    async with client_of(serving_of(prefill, facts=SCORES)) as client:
        scoring = asyncio.create_task(client.score("query", ["one", "two"]))
        await answer(prefill, [0.25])
        await answer(prefill, [0.5])
        assert list((await scoring).scores) == [0.25, 0.5]


async def test_inputs_can_be_cut() -> None:
    prefill = prefill_engine()
    async with client_of(serving_of(prefill)) as client, Answering(prefill):
        embeddings = (await client.embed(["a" * 100, "bcd", "e"], truncate_prompt_tokens=2)).embeddings
        assert [list(one.values) for one in embeddings] == [[2.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
        assert list((await client.score("query", ["a" * 100], truncate_prompt_tokens=-1)).scores)
    async with client_of(serving_of(prefill, facts=CLASSIFIES)) as client:
        with pytest.raises(CallFailed, match="truncate_prompt_tokens"):
            await client.classify("a", truncate_prompt_tokens=0)


async def test_what_is_wrong_is_named_by_its_field() -> None:
    async with client_of(serving_of(prefill_engine())) as client:
        with pytest.raises(CallFailed) as raised:
            await client.embed(["a", ""], dimensions=2)
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(raised.value.violations) == ["inputs[1].text"]
        with pytest.raises(ValueError, match="pooling is 'max'"):
            await client.embed("a", pooling="max")  # type: ignore[arg-type]  # what a program without types may do


async def test_a_pooling_that_this_version_does_not_know_is_the_clients_mistake() -> None:
    server = make_ingress_server(serving_of(prefill_engine()))
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            prompt = generate_pb2.Prompt(text="a")
            request = embed_pb2.EmbedRequest(inputs=[prompt], pooling=9)  # type: ignore[arg-type]  # of a newer client
            with pytest.raises(grpc.aio.AioRpcError, match="one of last, mean, cls") as raised:
                await embed_pb2_grpc.EmbedServiceStub(channel).Embed(request)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await server.drain(grace_s=0)


async def test_without_engines_that_compute_prompts_another_ingress_is_asked() -> None:
    prefill = prefill_engine()
    decode = FakeEngine("d0", EngineRole.DECODE)
    async with client_of(serving_of(decode), serving_of(prefill)) as client, Answering(prefill):
        assert len((await client.embed("a")).embeddings) == 1
    async with client_of(serving_of(decode)) as client:
        with pytest.raises(CallFailed, match="UNAVAILABLE: no engine computes prompts"):
            await client.embed("a")


async def test_a_client_that_leaves_or_is_out_of_time_aborts_all_its_inputs() -> None:
    prefill = prefill_engine()
    serving = serving_of(prefill)
    async with client_of(serving) as client:
        embedding = asyncio.create_task(client.embed(["a", "b"]))
        requests = [await prefill.next_request(), await prefill.next_request()]
        embedding.cancel()
        await asyncio.wait_for(prefill.has_aborted.wait(), 60)
        assert sorted(prefill.aborted) == sorted(request.request_id for request in requests)
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await client.embed("a", timeout_s=0.2)
        async with asyncio.timeout(60):
            while prefill.num_unfinished_requests:  # noqa: ASYNC110  # the server's task
                await asyncio.sleep(0.005)
