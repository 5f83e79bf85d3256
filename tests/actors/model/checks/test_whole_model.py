"""A model split over ranks is compared with the whole one, which is read a layer at a time.

Tests of actors/model/checks/self_check.py, actors/model/tensor_parallel/weight_sources.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from actors.config import ModelConfig
from actors.model import loader
from actors.model.attention.batch_attention import ATTENTION_NAME
from actors.model.checks import whole_model
from actors.model.checks.whole_model import decoder_layers, run_from_files
from actors.model.errors import SelfCheckFailed
from actors.model.loader import load_model
from actors.model.tensor_parallel import part as tensor_parallel
from actors.model.tensor_parallel.part import _Part
from actors.model.tensor_parallel.weight_sources import WeightSource
from tests.actors.model.ranks import on_each_rank
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

CheckpointOf = Callable[[str], Path]


def load_on_two_ranks(directory: Path, dtype: str = "float32") -> None:
    config = ModelConfig.model_validate({"model": str(directory), "device": "cpu", "dtype": dtype})
    on_each_rank(2, lambda group: load_model(config, group))


def read_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks read one weight as if a scale beside it had not been seen."""
    read = tensor_parallel._read

    def read_without_scale(weights: WeightSource, source: str, part: _Part) -> Tensor:
        weight = read(weights, source, part)
        return weight * 3 if source == name else weight

    monkeypatch.setattr(tensor_parallel, "_read", read_without_scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_split_model_that_reads_a_weight_wrong_is_refused_with_the_layer(
    dtype: str, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_wrong("model.layers.1.self_attn.v_proj.weight", monkeypatch)

    with pytest.raises(SelfCheckFailed, match=r"is not the model of the checkpoint.*layer 1 is the first that differs"):
        load_on_two_ranks(checkpoint("llama"), dtype)


def test_every_rank_fails(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    read_wrong("lm_head.weight", monkeypatch)
    config = ModelConfig(model=str(checkpoint("llama")), device="cpu")

    def refusal(group: Any) -> str:
        with pytest.raises(SelfCheckFailed) as caught:
            load_model(config, group)
        return caught.value.reason

    first, second = on_each_rank(2, refusal)
    assert "its layers agree" in first
    assert second.startswith("rank 0 found")


def test_where_time_is_short_layers_are_compared_and_that_is_said(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(whole_model, "MAX_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, whole_model.__name__):
        load_on_two_ranks(checkpoint("llama"))
    [record] = [r for r in caplog.records if r.name == whole_model.__name__]
    fields = vars(record)
    assert (fields["compared"], fields["num_layers"], fields["num_all_layers"]) == ("layers", 1, 3)

    read_wrong("model.layers.0.mlp.down_proj.weight", monkeypatch)
    with pytest.raises(SelfCheckFailed, match="layer 0 is the first"):
        load_on_two_ranks(checkpoint("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "qwen3_moe", "gpt2"])
def test_the_whole_model_is_transformers_own_and_no_more_than_a_layer_is_held(
    family: str, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    drop = whole_model._drop

    def count_and_drop(layer: Any, inputs: object, output: object) -> None:
        held.append(len([p for p in reader[0]._model.parameters() if p.device.type != "meta"]))
        drop(layer, inputs, output)

    def make_reader(*arguments: Any) -> Any:
        reader.append(make(*arguments))
        return reader[0]

    reader: list[Any] = []
    monkeypatch.setattr(whole_model, "_drop", count_and_drop)
    make = whole_model._Reader
    monkeypatch.setattr(whole_model, "_Reader", make_reader)
    directory = checkpoint(family)
    tokens = torch.randint(3, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(0))

    run = run_from_files(
        directory, AutoConfig.from_pretrained(directory), torch.float32, tokens, trust_remote_code=False
    )

    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    assert run.output is not None
    with torch.inference_mode():
        assert torch.equal(run.output, whole(tokens[None], use_cache=False).logits[0])
    per_layer = len(list(decoder_layers(whole)[0][1].parameters()))
    in_no_layer = len(list(whole.parameters())) - 3 * per_layer
    assert held == [in_no_layer + per_layer] * 3


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_split_model_keeps_its_own_attention(load_format: str, checkpoint: CheckpointOf) -> None:
    settings = {"model": str(checkpoint("llama")), "device": "cpu", "dtype": "float32", "load_format": load_format}
    config = ModelConfig.model_validate(settings)
    alone = threading.Lock()
    draw = loader._make_dummy_model

    def draw_alone(*arguments: Any) -> Any:
        with alone:
            return draw(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_make_dummy_model", draw_alone)
        loaded = on_each_rank(2, lambda group: load_model(config, group))
    assert [one.forward.model.config._attn_implementation for one in loaded] == [ATTENTION_NAME] * 2


def test_tied_embeddings_are_tied_in_the_whole_model_too(tmp_path: Path) -> None:
    load_on_two_ranks(make_checkpoint("llama", tmp_path, tie_word_embeddings=True))
