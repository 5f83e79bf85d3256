"""Samples with drafts, against what their seeds draw from the distribution that transformers computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.model.sampling.philox import uniforms
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest
from tests.actors.speculation import EAGER
from tests.integration.promises import engines_config, token_ids_of
from tests.integration.recovering_cluster import recovering_cluster
from tests.integration.test_samples import collect_many
from tests.reference import random_prompt

_N: Final = 8
_NUM_TOKENS: Final = 40
_ROUNDING: Final = 1e-5
"""How far a probability in float32 may be from the one in float64, summed up over the vocabulary."""


def distance_to_draw(directory: Path, prompt: list[int], token_ids: list[int], seed: int, temperature: float) -> float:
    """How far the seed's numbers are, at most, from the intervals of the cumulative distribution of these tokens."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    ends = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1).numpy()
    rows, tokens = np.arange(len(token_ids)), np.array(token_ids)
    begins = np.where(tokens > 0, ends[rows, tokens - 1], 0.0)
    numbers = uniforms(np.full(len(rows), seed, dtype=np.uint64), rows.astype(np.uint64))
    return float(np.maximum(begins - numbers, numbers - ends[rows, tokens]).max())


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("num_tail_tokens", [0, 3])
async def test_each_sample_is_what_its_seed_draws(
    checkpoint: Callable[[str], Path], num_tail_tokens: int, temperature: float
) -> None:
    directory = checkpoint("llama")
    prompt = (random_prompt(12) * 4)[: 40 + num_tail_tokens]  # blocks are of 8 tokens
    config = engines_config(directory)
    config = config.model_copy(
        update={"scheduler": config.scheduler.model_copy(update={"speculative": EAGER, "max_num_seqs": 2 * _N})}
    )
    sampling = SamplingOptions(temperature=temperature, seed=5, max_tokens=_NUM_TOKENS, ignore_eos=True)
    each = GenerateRequest(prompt=None, request_id="drawn", sampling=sampling)
    async with recovering_cluster(config, ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        request = GenerateManyRequest(prompts=[TokenPrompt(prompt)], n=_N, best_of=None, each=each)
        samples = await collect_many(cluster.serving, request)
        await cluster.until_idle()
        stats = cluster.engines["decode-0"].stats.spec_decoding_stats
    assert stats is not None
    assert stats.num_draft_tokens > 0
    outputs = {index: token_ids_of(chunks) for (_, index), chunks in samples.items()}
    assert {len(token_ids) for token_ids in outputs.values()} == {_NUM_TOKENS}
    for (_, index), chunks in samples.items():
        distance = distance_to_draw(directory, prompt, outputs[index], chunks[0].seed or 0, temperature)
        assert distance < _ROUNDING, f"sample {index}"
