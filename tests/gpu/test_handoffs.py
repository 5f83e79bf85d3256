"""Two engines on a GPU hand requests over: models with sinks, unlike layers, latents and recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from actors.config import EngineConfig
from actors.core.requests.sampling_params import SamplingParams
from tests.checkpoints import RECURRENT_FAMILIES
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FAMILIES: Final = ("llama", "gpt_oss", "gemma4", "gemma3n", "mimo", "llama4", "deepseek_v3", "longcat_flash")
LENGTHS: Final = (1, 17, 56)
NUM_TOKENS: Final = 12
BLOCK_SIZE: Final = 8


def config_of(directory: Path) -> EngineConfig:
    """A prompt of 56 tokens is computed in three chunks, beside other prompts and beside requests that decode."""
    config = engine_config(
        directory, block_size=BLOCK_SIZE, num_blocks=16384, max_num_seqs=8, max_num_batched_tokens=24, overlap=True
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return config.model_copy(update={"model": config.model.model_copy(update={"device": device})})


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT_FAMILIES])
def test_tokens_equal_generate_over_chunks_and_prefix_hits(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    config = config_of(directory)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with EnginePair(config, config) as pair:
        for round_name in ("first", "again"):
            for length in LENGTHS:
                pair.hand_over(f"{round_name}-{length}", random_prompt(length), greedy)
            pair.submit("decode", f"{round_name}-local", random_prompt(40), greedy)
            pair.run()
            for length in LENGTHS:
                answer = pair.answers[f"{round_name}-{length}"]
                assert answer.token_ids == greedy_tokens(directory, tuple(random_prompt(length)), NUM_TOKENS)
                num_cached_tokens = (length - 1) // BLOCK_SIZE * BLOCK_SIZE if round_name == "again" else 0
                assert answer.timings("prefill").num_cached_tokens >= num_cached_tokens
            local = pair.answers[f"{round_name}-local"].token_ids
            assert local == greedy_tokens(directory, tuple(random_prompt(40)), NUM_TOKENS)
        pair.assert_whole()
