"""Clusters whose engines all have one role: prefill without decode, and decode without prefill, serve all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.client.channel import open_channel
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import grpc_settings, make_ingress_server
from tests.engine_pair import engine_config
from tests.integration.idle_engines import until_all_idle
from tests.integration.local_cluster import local_cluster
from tests.reference import greedy_tokens, random_prompt

NUM_TOKENS = 8


@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.DECODE])
async def test_engines_of_one_role_serve_requests_through_the_ingress(
    role: EngineRole, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory)
    config = config.model_copy(update={"kv_transfer": config.kv_transfer.model_copy(update={"transport": "auto"})})
    async with local_cluster(config, only=role) as cluster:
        server = make_ingress_server(cluster.serving, settings=grpc_settings())
        port = await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = generate_pb2_grpc.GenerateServiceStub(channel)
            for seed in range(16):
                prompt = random_prompt(20 + seed, seed=seed)
                request = generate_pb2.GenerateRequest(
                    token_ids=generate_pb2.TokenIds(ids=prompt),
                    sampling_params=generate_pb2.SamplingParams(
                        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
                    ),
                )
                answer = [
                    token_id async for chunk in stub.Generate(request, timeout=60) for token_id in chunk.token_ids
                ]
                assert answer == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
        await server.drain(grace_s=0)
        await until_all_idle(cluster.engines.values())
        assert all(engine.stats.num_prompt_tokens_computed for engine in cluster.engines.values()), "both had a part"
