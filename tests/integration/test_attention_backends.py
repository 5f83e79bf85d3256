"""Engines with different attention backends hand requests over, if they keep keys in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from actors.config import EngineConfig, SpeculativeConfig
from actors.core.requests.request import RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = pytest.mark.usefixtures("shared_models")

Backend = Literal["torch", "vllm_cpu"]
NUM_TOKENS = 24
LENGTHS = (5, 30, 17, 40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads wide enough for every backend."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("wide") / "llama", hidden_size=128, head_dim=32)


def engine(directory: Path, backend: Backend, *, drafts: bool = False) -> EngineConfig:
    config = engine_config(directory, num_blocks=64, max_num_batched_tokens=48)
    cache = config.cache.model_copy(update={"attention_backend": backend, "key_order": "transposed"})
    speculative = SpeculativeConfig(num_tokens=3, prompt_lookup_min=1) if drafts else None
    scheduler = config.scheduler.model_copy(update={"speculative": speculative})
    return config.model_copy(update={"cache": cache, "scheduler": scheduler})


def check(pair: EnginePair, directory: Path) -> None:
    """Hand prompts over twice, so that the second ones find the first ones' blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = {f"r{length}": random_prompt(length) for length in LENGTHS}
    for turn in ("first", "second"):
        pair.answers.clear()
        for name, prompt in prompts.items():
            pair.hand_over(f"{turn}-{name}", prompt, params)
        pair.run()
        for name, prompt in prompts.items():
            expected = greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
            assert pair.answers[f"{turn}-{name}"].token_ids == expected, (turn, name)
    pair.assert_whole()
    assert RequestStatus.WAITING_FOR_REMOTE_KVS in pair.seen_statuses


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("torch", "torch"),
        pytest.param("vllm_cpu", "torch", marks=NEEDS_VLLM_CPU),
        pytest.param("torch", "vllm_cpu", marks=NEEDS_VLLM_CPU),
        pytest.param("vllm_cpu", "vllm_cpu", marks=NEEDS_VLLM_CPU),
    ],
)
def test_handed_over_tokens_equal_generate_whatever_the_backends(
    prefill: Backend, decode: Backend, directory: Path
) -> None:
    with EnginePair(engine(directory, prefill), engine(directory, decode)) as pair:
        check(pair, directory)


@pytest.mark.parametrize("backend", ["torch", pytest.param("vllm_cpu", marks=NEEDS_VLLM_CPU)])
def test_drafts_are_checked_together_and_keep_the_tokens(backend: Backend, directory: Path) -> None:
    with EnginePair(engine(directory, backend), engine(directory, backend, drafts=True)) as pair:
        check(pair, directory)
