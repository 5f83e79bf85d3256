"""Prompts of embeddings equal generate(inputs_embeds=...), however they are cut and with whomever they are batched.

Tests of actors/model/prompt_embeds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.parameters.generation import EmbedsPrompt
from cluster.text.prompt_embeds_input import read_embeds
from tests.actors.test_multi_rank_engine import running
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, greedy_tokens_after, random_embeds, random_prompt

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def request_of(
    request_id: str, embeds: torch.Tensor, params: SamplingParams = PARAMS, dtype: torch.dtype = torch.float32
) -> EngineCoreRequest:
    data = embeds.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    prompt = EmbedsPrompt(data, len(embeds), embeds.shape[1], str(dtype).removeprefix("torch."))
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[0] * len(embeds),
        sampling_params=params,
        prompt_embeds=read_embeds(prompt),
    )


def submit(pair: EnginePair, request: EngineCoreRequest) -> None:
    pair.answers[request.request_id] = Answer()
    pair.engines["decode"].submit(request)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "opt"])
def test_embeddings_and_tokens_are_batched_together(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    config = engine_config(directory, block_size=8, max_num_batched_tokens=40)
    all_embeds = {f"embeds {length}": random_embeds(directory, length) for length in (1, 16, 45)}
    prompt = random_prompt(33)
    with EnginePair(config, config) as pair:
        for name, embeds in all_embeds.items():
            submit(pair, request_of(name, embeds))
            pair.submit("decode", f"tokens beside {name}", prompt, PARAMS, None)
        pair.run()
        for name, embeds in all_embeds.items():
            assert pair.answers[name].token_ids == greedy_tokens_after(directory, embeds, NUM_TOKENS), name
            beside = pair.answers[f"tokens beside {name}"].token_ids
            assert beside == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
        pair.assert_whole()


def test_equal_embeddings_share_blocks_and_others_do_not(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory, block_size=8)
    first, second = random_embeds(directory, 30), random_embeds(directory, 30, seed=1)
    with EnginePair(config, config) as pair:
        for name, embeds in (("first", first), ("again", first), ("second", second)):
            submit(pair, request_of(name, embeds))
            pair.run()
            assert pair.answers[name].token_ids == greedy_tokens_after(directory, embeds, NUM_TOKENS)
        cached = [pair.answers[name].timings("decode").num_cached_tokens for name in ("first", "again", "second")]
        assert cached == [0, 24, 0]


def test_bfloat16_embeddings_are_what_they_say(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    embeds = random_embeds(directory, 20).to(torch.bfloat16)
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        submit(pair, request_of("r", embeds, dtype=torch.bfloat16))
        pair.run()
        assert pair.answers["r"].token_ids == greedy_tokens_after(directory, embeds.float(), NUM_TOKENS)


def test_penalties_see_the_output_alone(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    embeds = random_embeds(directory, 20)
    # Token 0 stands in the prompt's place, and has not been said.
    params = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=10.0, logit_bias={0: 12.0})
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        submit(pair, request_of("r", embeds, params))
        pair.run()
        assert pair.answers["r"].token_ids == [0]


def test_all_ranks_of_an_engine_look_them_up(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    embeds = random_embeds(directory, 30)
    answer = Answer()
    with running(directory, RankThreads, size=2, overlap=True) as engine:
        engine.core.submit(request_of("r", embeds))
        while not answer.is_finished:
            for batch in engine.core.step().outputs.values():
                for output in batch.outputs:
                    answer.take("engine", output)
    assert answer.token_ids == greedy_tokens_after(directory, embeds, NUM_TOKENS)
