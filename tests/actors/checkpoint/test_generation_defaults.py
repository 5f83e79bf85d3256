"""generation_config.json counts for requests as it counts for generate()."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.checkpoint.generation_defaults import (
    NO_DEFAULTS,
    GenerationDefaults,
    GenerationFile,
    InvalidGenerationConfig,
    read_generation_file,
)
from actors.config import ModelConfig
from actors.model.errors import CheckpointError
from actors.model.loader import load_model
from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import resolve_sampling
from tests.actors.test_multi_rank_engine import running
from tests.rank_threads import RankThreads
from tests.reference import random_prompt

CheckpointOf = Callable[[str], Path]


def write(directory: Path, **content: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_what_the_file_names_is_read_and_nothing_else(tmp_path: Path) -> None:
    assert read_generation_file(tmp_path) == GenerationFile(NO_DEFAULTS, None)
    write(tmp_path, do_sample=True, temperature=0.6, top_k=-1, top_p=None, max_new_tokens=7, eos_token_id=[5, 7])
    defaults = GenerationDefaults(temperature=0.6, top_k=0, max_tokens=7)
    assert read_generation_file(tmp_path) == GenerationFile(defaults, (5, 7))
    assert read_generation_file(write(tmp_path, eos_token_id=3)) == GenerationFile(NO_DEFAULTS, (3,))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"temperature": "hot"}', 'temperature is "hot", and must be a number from 0'),
        ('{"temperature": NaN}', "temperature is NaN"),
        ('{"top_p": 0}', "top_p is 0, and must be a number above 0 to 1"),
        ('{"top_k": 1.5}', "top_k is 1.5, and must be a whole number"),
        ('{"min_p": true}', "min_p is true"),
        ('{"repetition_penalty": -1}', "repetition_penalty is -1"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_the_weights_are_read(
    content: str, said: str, checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(InvalidGenerationConfig, match=said):
        read_generation_file(directory)

    def read_weights(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read_weights)
    with pytest.raises(CheckpointError, match=said):
        load_model(ModelConfig(model=str(directory), device="cpu"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_request_without_parameters_gives_what_generate_gives(
    family: str, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    # One token is left to draw from, so both draw the same.
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.7, "repetition_penalty": 1.8, "max_new_tokens": 24}
    directory = write(shutil.copytree(checkpoint(family), tmp_path / "model"), **settings)
    prompt = random_prompt(21)
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(directory, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=1.0)[0, len(prompt) :].tolist()
    assert len(tokens) == 24
    assert tokens != plain, "the penalty has to show"

    defaults = read_generation_file(directory).defaults
    assert defaults.max_tokens == 24
    params = resolve_sampling(SamplingOptions(), 24, (), defaults)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = {name: getattr(params, name) for name in names}
    with running(directory, RankThreads, size=1) as engine:
        assert engine.generate(prompt, 24, **sampling) == tokens


def test_what_a_client_gives_wins_even_if_it_is_raypds_own_default() -> None:
    defaults = GenerationDefaults(temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
    explicit = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1)
    plain = resolve_sampling(SamplingOptions(seed=1), 16)
    assert resolve_sampling(explicit, 16, (), defaults) == plain
    filled = resolve_sampling(SamplingOptions(seed=1), 16, (), defaults)
    given = {name: value for name, value in dataclasses.asdict(defaults).items() if value is not None}
    assert filled == dataclasses.replace(plain, **given)
