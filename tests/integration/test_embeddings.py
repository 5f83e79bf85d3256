"""Vectors through a running cluster: prefill engines give them, beside answers, also when one of them dies.

Tests of cluster/commands/print_vectors.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from actors.config import EngineConfig
from cluster.cli import app
from cluster.errors import InvalidRequest
from cluster.parameters.generation import GenerateRequest, TextPrompt, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.vectors.vector_requests import ClassifyRequest, EmbedRequest, ScoreRequest
from kv_transfer.config import KVTransferConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.serving_setup import make_ingress_server
from tests.engine_pair import engine_config
from tests.integration.idle_engines import until_all_idle
from tests.integration.local_cluster import local_cluster
from tests.integration.promises import token_ids_of
from tests.integration.recovering_cluster import collect, recovering_cluster
from tests.pooled import embedding_of, logits_of, write_pipeline
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.timeout(120)

CheckpointOf = Callable[[str], Path]
TIMEOUT_S = 60.0
PROMPTS = [random_prompt(20 + 7 * index, seed=index) for index in range(6)]


def config_of(directory: Path) -> EngineConfig:
    tcp = KVTransferConfig(transport="tcp")
    return engine_config(directory, block_size=8, max_num_batched_tokens=32, overlap=True, transfer=tcp)


def tokens(prompt: list[int]) -> TokenPrompt:
    return TokenPrompt(prompt)


async def test_a_cluster_embeds_while_it_answers_and_its_decode_engine_has_no_part_in_it(
    checkpoint: CheckpointOf,
) -> None:
    directory = checkpoint("llama")
    sampling = SamplingOptions(temperature=0.0, max_tokens=12, ignore_eos=True)
    async with local_cluster(config_of(directory)) as cluster, asyncio.timeout(TIMEOUT_S):
        embedding = cluster.serving.embed(EmbedRequest(inputs=[tokens(prompt) for prompt in PROMPTS], pooling="mean"))
        answering = collect(cluster.serving, GenerateRequest(prompt=tokens(PROMPTS[0]), sampling=sampling))
        result, chunks = await asyncio.gather(embedding, answering)
        assert token_ids_of(chunks) == greedy_tokens(directory, tuple(PROMPTS[0]), 12)
        for prompt, vector in zip(PROMPTS, result.embeddings, strict=True):
            assert vector == pytest.approx(embedding_of(directory, prompt, "mean"), abs=2e-5)
        assert result.usage.num_prompt_tokens == sum(map(len, PROMPTS))
        await until_all_idle(cluster.engines.values())
        assert cluster.engines["decode-0"].stats.num_prompt_tokens_computed == 0
        scores = await cluster.serving.score(ScoreRequest(query=tokens(PROMPTS[0]), documents=[tokens(PROMPTS[0])]))
        assert scores.scores == pytest.approx([1.0])


async def test_what_a_dying_engine_had_is_embedded_by_another(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    async with recovering_cluster(config_of(directory), ["prefill-0", "prefill-1"]) as cluster:
        await cluster.join("prefill-0")
        cluster.barriers["prefill-0"].close(1)
        async with asyncio.timeout(TIMEOUT_S):
            request = EmbedRequest(inputs=[tokens(prompt) for prompt in PROMPTS], pooling="mean")
            embedding = asyncio.create_task(cluster.serving.embed(request))
            await cluster.barriers["prefill-0"].is_reached.wait()
            await cluster.join("prefill-1")
            await cluster.kill("prefill-0")
            result = await embedding
            for prompt, vector in zip(PROMPTS, result.embeddings, strict=True):
                assert vector == pytest.approx(embedding_of(directory, prompt, "mean"), abs=2e-5)
            await cluster.until_idle()


async def test_who_leaves_gives_every_block_back(checkpoint: CheckpointOf) -> None:
    async with recovering_cluster(config_of(checkpoint("llama")), ["prefill-0"]) as cluster:
        await cluster.join("prefill-0")
        cluster.barriers["prefill-0"].close(1)
        async with asyncio.timeout(TIMEOUT_S):
            request = EmbedRequest(inputs=[tokens(prompt) for prompt in PROMPTS], pooling="mean")
            embedding = asyncio.create_task(cluster.serving.embed(request))
            await cluster.barriers["prefill-0"].is_reached.wait()
            embedding.cancel()
            await asyncio.gather(embedding, return_exceptions=True)
            cluster.barriers["prefill-0"].open()
            await cluster.until_idle()


async def test_a_classifier_with_one_class_scores_texts_that_it_reads_together(tmp_path: Path) -> None:
    directory = make_checkpoint("qwen3", tmp_path, auto_class=AutoModelForSequenceClassification, num_labels=1)
    async with local_cluster(config_of(directory)) as cluster, asyncio.timeout(TIMEOUT_S):
        tokenizer = cluster.serving.newest_model().input_processor.tokenizer
        documents = ["the blocks of the cache", "déjà vu"]
        query = "which blocks?"
        result = await cluster.serving.score(
            ScoreRequest(query=TextPrompt(query), documents=[TextPrompt(document) for document in documents])
        )
        logits = [logits_of(directory, tokenizer.encode_pair(query, document)) for document in documents]
        assert result.scores == pytest.approx([float(one.sigmoid()[0]) for one in logits], abs=2e-5)
        classified = await cluster.serving.classify(ClassifyRequest(inputs=[tokens(PROMPTS[0])], activate=False))
        assert classified.scores[0] == pytest.approx(logits_of(directory, PROMPTS[0]).tolist(), abs=2e-5)
        with pytest.raises(InvalidRequest, match="it classifies and scores"):
            await cluster.serving.embed(EmbedRequest(inputs=[tokens(PROMPTS[0])]))
        with pytest.raises(InvalidRequest, match="this one gives vectors"):
            await collect(cluster.serving, GenerateRequest(prompt=tokens(PROMPTS[0])))


async def test_a_checkpoint_is_embedded_as_its_files_say(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = make_checkpoint("llama", tmp_path)
    write_pipeline(tmp_path, {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling")
    async with local_cluster(config_of(directory)) as cluster, asyncio.timeout(TIMEOUT_S):
        result = await cluster.serving.embed(EmbedRequest(inputs=[TextPrompt("where do blocks travel?")]))
        prompt = cluster.serving.newest_model().input_processor.tokenizer.encode("where do blocks travel?")
        assert result.embeddings[0] == pytest.approx(embedding_of(directory, prompt, "mean", normalize=False), abs=1e-4)


async def test_the_pages_example_runs(checkpoint: CheckpointOf, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    async with local_cluster(config_of(checkpoint("llama"))) as cluster, asyncio.timeout(TIMEOUT_S):
        server = make_ingress_server(cluster.serving)
        address = f"127.0.0.1:{await server.start()}"
        try:
            code = compile(example.replace("127.0.0.1:50051", address), "docs/embeddings.md", "exec")
            await asyncio.to_thread(exec, code, {})
            command = ["embed", "first", "second", "--address", address, "--dimensions", "3", "--pooling", "mean"]
            printed = await asyncio.to_thread(CliRunner().invoke, app, command)
        finally:
            await server.drain(grace_s=0)
    assert capsys.readouterr().out.splitlines() == ["32 1.0", "32 1.0", "32 1.0", "True 1", "[1.0, True]"]
    assert [len(json.loads(line)) for line in printed.output.splitlines()] == [3, 3]
