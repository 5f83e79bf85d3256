"""Vectors are those of transformers' own model, however a prompt is cut, batched, cached and preempted.

Tests of actors/model/pooling/head.py, actors/model/pooling/loading.py, actors/model/pooling/pooler.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from actors.config import EngineConfig, SpeculativeConfig
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.engine_builder import build_engine_core
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from tests.actors.test_multi_rank_engine import RunningEngine, running
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.pooled import embedding_of, logits_of
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST

CheckpointOf = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
EMBEDDINGS = {
    "last": PoolingParams(),
    "mean": PoolingParams(pooling="mean"),
    "cls": PoolingParams(pooling="cls", normalize=False),
    "cut": PoolingParams(pooling="mean", dimensions=7),
}


def pooling_request(request_id: str, prompt: list[int], params: PoolingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(),
        pooling_params=params,
        arrival_time_s=time.monotonic(),
    )


def ask(pair: EnginePair, request_id: str, prompt: list[int], params: PoolingParams) -> None:
    pair.answers[request_id] = Answer()
    pair.engines["prefill"].submit(pooling_request(request_id, prompt, params))


def vector_of(pair: EnginePair, request_id: str) -> list[float]:
    end = pair.answers[request_id].last["prefill"]
    assert (end.finish_reason, end.new_token_ids) == (FinishReason.STOP, []), end.error
    assert end.pooling_output is not None
    return end.pooling_output


def expected_embedding(directory: Path, prompt: list[int], params: PoolingParams) -> object:
    vector = embedding_of(directory, prompt, params.pooling, normalize=params.normalize, dimensions=params.dimensions)
    return pytest.approx(vector, abs=2e-5)


def close_to(logits: torch.Tensor, config: pytest.Config) -> object:
    """Equal but for rounding in float32.

    The kernels of other backends than torch add in another order, whose rounding grows with the largest number of the
    sum; a logit may be 15.
    """
    has_plugin = any(map(config.pluginmanager.hasplugin, ("tests.vllm_cpu_plugin", "tests.triton_on_cpu")))
    tolerance = max(2e-5, 5e-6 * float(logits.abs().max())) if has_plugin else 2e-5
    return pytest.approx(logits.tolist(), abs=tolerance)


@contextmanager
def one_engine(config: EngineConfig) -> Iterator[EnginePair]:
    """The prefill engine of a pair whose other one is not needed."""
    wake, address = threading.Event(), EngineAddress("prefill-0", 1, "prefill-0")
    core = build_engine_core(config, address, LoopbackHub().control(address), wake.set, trust=TRUST)
    with EnginePair.of({"prefill": core}, {"prefill": address}, wake) as pair:
        yield pair


def pool(engine: RunningEngine, prompt: list[int], params: PoolingParams) -> list[float]:
    """The vector of one request that an engine of several ranks is given alone."""
    engine.core.submit(pooling_request("r", prompt, params))
    while True:
        for batch in engine.core.step().outputs.values():
            for output in batch.outputs:
                assert output.pooling_output is not None, output.error
                return output.pooling_output


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_short_of_blocks", [False, True])
def test_chunked_and_preempted_prompts_beside_others_that_generate(
    is_short_of_blocks: bool, overlap: bool, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    num_blocks = 20 if is_short_of_blocks else 256
    config = engine_config(
        directory, block_size=4, num_blocks=num_blocks, max_num_batched_tokens=8, overlap=overlap, max_num_seqs=8
    )
    prompts = {name: random_prompt(40 + index, seed=index) for index, name in enumerate(EMBEDDINGS)}
    generating = {f"tokens-{index}": random_prompt(14 + index, seed=index) for index in range(2)}
    with EnginePair(config, engine_config(directory)) as pair:
        for name, prompt in generating.items():
            pair.submit("prefill", name, prompt, GREEDY, None)
        for name, params in EMBEDDINGS.items():
            ask(pair, name, prompts[name], params)
        handed_over = random_prompt(30, seed=9)
        pair.hand_over("handed over", handed_over, GREEDY)
        pair.run()
        for name, params in EMBEDDINGS.items():
            assert vector_of(pair, name) == expected_embedding(directory, prompts[name], params), name
        for name, prompt in {**generating, "handed over": handed_over}.items():
            assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), GREEDY.max_tokens)
        preempted = [name for name in EMBEDDINGS if pair.answers[name].timings("prefill").num_preemptions]
        assert bool(preempted) == is_short_of_blocks
        pair.assert_whole()


def test_a_cached_prefix_is_read_only_where_its_hidden_states_are_not_wanted(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(50)
    config = engine_config(directory, block_size=8)
    with EnginePair(config, config) as pair:
        pair.hand_over("before", prompt, GREEDY)
        pair.run()
        for name, params in EMBEDDINGS.items():
            ask(pair, name, prompt, params)
        pair.run()
        cached = {name: pair.answers[name].timings("prefill").num_cached_tokens for name in EMBEDDINGS}
        assert cached == {"last": 48, "mean": 0, "cls": 0, "cut": 0}
        for name, params in EMBEDDINGS.items():
            assert vector_of(pair, name) == expected_embedding(directory, prompt, params), name
        # What a pooling request has computed serves others.
        other = random_prompt(33, seed=5)
        ask(pair, "mean again", other, EMBEDDINGS["mean"])
        pair.run()
        pair.hand_over("after", other, GREEDY)
        pair.run()
        assert pair.answers["after"].timings("prefill").num_cached_tokens == 32
        assert pair.answers["after"].token_ids == greedy_tokens(directory, tuple(other), GREEDY.max_tokens)


def test_prompts_that_want_a_vector_beside_drafts(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(9) * 4
    config = engine_config(directory, max_num_batched_tokens=32)
    speculative = SpeculativeConfig(num_tokens=3, min_acceptance=0.01, prompt_lookup_min=1)
    scheduler = config.scheduler.model_copy(update={"speculative": speculative})
    with one_engine(config.model_copy(update={"scheduler": scheduler})) as pair:
        pair.submit("prefill", "drafting", prompt, GREEDY, None)
        for name, params in EMBEDDINGS.items():
            ask(pair, name, prompt, params)
        pair.run()
        assert pair.answers["drafting"].token_ids == greedy_tokens(directory, tuple(prompt), GREEDY.max_tokens)
        for name, params in EMBEDDINGS.items():
            assert vector_of(pair, name) == expected_embedding(directory, prompt, params), name
        stats = pair.engines["prefill"].make_stats().spec_decoding_stats
        assert stats is not None
        assert stats.num_draft_tokens


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "opt", "mixtral"])
def test_every_kind_of_layer_gives_its_last_hidden_states(family: str, checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint(family), random_prompt(40)
    config = engine_config(directory, max_num_batched_tokens=32)
    with one_engine(config) as pair:
        for name, params in EMBEDDINGS.items():
            ask(pair, name, prompt, params)
        pair.run()
        for name, params in EMBEDDINGS.items():
            assert vector_of(pair, name) == expected_embedding(directory, prompt, params), name


def test_a_model_without_a_head_embeds_a_prompt_of_full_length_and_does_not_generate(tmp_path: Path) -> None:
    directory = make_checkpoint("qwen3", tmp_path, auto_class=AutoModel, max_position_embeddings=64)
    prompt = random_prompt(64)
    config = engine_config(directory, block_size=16, num_blocks=4, max_num_batched_tokens=40)
    with one_engine(config) as pair:
        ask(pair, "full", prompt, EMBEDDINGS["mean"])
        ask(pair, "too long", [*prompt, 5], EMBEDDINGS["mean"])
        pair.submit("prefill", "tokens", prompt[:8], GREEDY, None)
        pair.run()
        assert vector_of(pair, "full") == expected_embedding(directory, prompt, EMBEDDINGS["mean"])
        assert "max_model_len is 64" in (pair.answers["too long"].last["prefill"].error or "")
        refusal = pair.answers["tokens"].last["prefill"].error
        assert refusal == "the request needs a language head, which this engine does not have"
        pair.assert_whole()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_an_encoder_sees_a_whole_prompt_in_one_step(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(family, tmp_path, auto_class=AutoModel)
    prompts = {
        name: random_prompt(length, seed=length) for name, length in zip(EMBEDDINGS, (40, 1, 64, 25), strict=True)
    }
    config = engine_config(directory, block_size=8, max_num_batched_tokens=64, overlap=True)
    with one_engine(config) as pair:
        for _ in range(2):
            for name, params in EMBEDDINGS.items():
                ask(pair, name, prompts[name], params)
            pair.run()
            for name, params in EMBEDDINGS.items():
                assert vector_of(pair, name) == expected_embedding(directory, prompts[name], params), name
                assert pair.answers[name].timings("prefill").num_cached_tokens == 0
        ask(pair, "too long", random_prompt(65), EMBEDDINGS["mean"])
        pair.run()
        assert "max_model_len is 64" in (pair.answers["too long"].last["prefill"].error or "")
        pair.assert_whole()


def test_a_classification_head_gives_scores_or_logits(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    directory = make_checkpoint("qwen2", tmp_path, auto_class=AutoModelForSequenceClassification, id2label=labels)
    config = engine_config(directory, max_num_batched_tokens=32)
    prompts = [random_prompt(length, seed=length) for length in (1, 20, 45)]
    with one_engine(config) as pair:
        for index, prompt in enumerate(prompts):
            ask(pair, f"scores-{index}", prompt, PoolingParams(task="classify"))
            ask(pair, f"logits-{index}", prompt, PoolingParams(task="classify", activate=False))
        ask(pair, "embedding", prompts[1], PoolingParams())
        pair.run()
        for index, prompt in enumerate(prompts):
            logits = logits_of(directory, prompt)
            assert vector_of(pair, f"logits-{index}") == close_to(logits, pytestconfig)
            assert vector_of(pair, f"scores-{index}") == close_to(logits.softmax(-1), pytestconfig)
        assert "needs embeddings" in (pair.answers["embedding"].last["prefill"].error or "")


def test_all_ranks_of_an_engine_have_the_hidden_states(
    checkpoint: CheckpointOf, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    prompt = random_prompt(40)
    classifier = make_checkpoint("llama", tmp_path, auto_class=AutoModelForSequenceClassification)
    with running(checkpoint("llama"), RankThreads, size=2, overlap=True) as engine:
        vector = pool(engine, prompt, EMBEDDINGS["mean"])
        assert vector == expected_embedding(checkpoint("llama"), prompt, EMBEDDINGS["mean"])
    with running(classifier, RankThreads, size=2) as engine:
        logits = logits_of(classifier, prompt)
        assert pool(engine, prompt, PoolingParams(task="classify", activate=False)) == close_to(logits, pytestconfig)
