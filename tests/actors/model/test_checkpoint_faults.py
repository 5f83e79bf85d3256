"""A checkpoint that is not what its config says is refused with the names of what is wrong.

Tests of actors/model/checks/weight_checks.py.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from actors.config import ModelConfig
from actors.model import loader
from actors.model.errors import CheckpointError, LoadFailed, UnsupportedModel
from actors.model.loader import LoadedModel, load_model
from tests.actors.model.config.test_support import SMALL, dummy
from tests.actors.model.ranks import on_each_rank

CheckpointOf = Callable[[str], Path]
Change = Callable[[dict[str, Tensor]], object]


def load(directory: Path, **settings: object) -> LoadedModel:
    return load_model(ModelConfig.model_validate({"model": str(directory), "device": "cpu"} | settings))


def load_on_two_ranks(directory: Path) -> list[LoadedModel]:
    config = ModelConfig(model=str(directory), device="cpu")
    return on_each_rank(2, lambda group: load_model(config, group))


def changed(source: Path, directory: Path, change: Change) -> Path:
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _spoil(weights: dict[str, Tensor], name: str, number: float) -> None:
    weights[name][3, 2] = number


FAULTS: dict[str, tuple[Change, str]] = {
    "NaN": (
        lambda w: _spoil(w, "model.layers.1.mlp.up_proj.weight", float("nan")),
        r"model\.layers\.1\.mlp\.up_proj\.weight in .* has NaN",
    ),
    "infinite": (
        lambda w: _spoil(w, "model.embed_tokens.weight", float("inf")),
        r"model\.embed_tokens\.weight in .* has infinite numbers",
    ),
    "unread": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1), "extra.weight": torch.ones(2)}),
        r"does not read.*: extra\.weight, model\.layers\.0\.mlp\.up_proj\.weight_scale",
    ),
    "a layer too many": (
        lambda w: w.update({"model.layers.3.input_layernorm.weight": torch.ones(48)}),
        r"does not read.*model\.layers\.3\.input_layernorm",
    ),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_weight_at_fault_is_named(fault: str, num_ranks: int, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    change, expected = FAULTS[fault]
    directory = changed(checkpoint("llama"), tmp_path / "model", change)

    with pytest.raises(CheckpointError, match=expected):
        load(directory) if num_ranks == 1 else load_on_two_ranks(directory)


LEFTOVERS: dict[str, dict[str, object]] = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": {},
    "score.weight": {},
    "v_head.summary.weight": {},
    "mtp.layers.0.mlp.up_proj.weight": {},
    "model.mtp_layers.0.mlp.up_proj.weight": {},
    "model.layers.3.eh_proj.weight": {"num_nextn_predict_layers": 1},
    "vision_tower.encoder.layers.0.mlp.fc1.weight": {},
    "model.visual.blocks.0.mlp.fc1.weight": {},
    "multi_modal_projector.linear_1.weight": {},
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_checkpoints_are_known_to_hold_besides_is_no_fault(
    name: str, num_ranks: int, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    directory = changed(checkpoint("llama"), tmp_path / "model", lambda weights: weights.update({name: torch.ones(6)}))
    add_to_config(directory, LEFTOVERS[name])

    assert load(directory) if num_ranks == 1 else load_on_two_ranks(directory)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_head_beside_embeddings_that_it_is_tied_to_is_no_fault(
    num_ranks: int, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    def tie(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    directory = changed(checkpoint("llama"), tmp_path / "model", tie)
    add_to_config(directory, {"tie_word_embeddings": True})

    assert load(directory) if num_ranks == 1 else load_on_two_ranks(directory)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_the_models_class_declares_to_be_ignored_is_no_fault(
    num_ranks: int, checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^frob\."])
    directory = changed(checkpoint("llama"), tmp_path / "model", lambda w: w.update({"frob.weight": torch.ones(2)}))

    assert load(directory) if num_ranks == 1 else load_on_two_ranks(directory)


def add_to_config(directory: Path, settings: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


def test_weights_of_another_vocabulary_are_named_with_both_shapes(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[384, 48\] instead of \[400, 48\]"):
        load(directory)


def test_a_model_whose_config_wants_a_padding_token_is_served(tmp_path: Path) -> None:
    settings = SMALL | {"layer_types": ["full_attention"] * 2}

    assert load_model(dummy("modernbert-decoder", settings, tmp_path)).geometry.num_layers == 2


def test_a_missing_package_is_named(checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def need_package(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Loading it requires frob (`pip install frob`)")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", need_package)

    with pytest.raises(UnsupportedModel, match=r"a package to load it that is not installed .*requires frob"):
        load(checkpoint("llama"))


class UnpicklableError(Exception):
    def __init__(self, field: str, cause: Exception) -> None:
        super().__init__(f"{field}:\n    {cause}")


def test_what_nobody_foresaw_reaches_another_process_as_our_own_error(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise UnpicklableError("heads", ValueError("5 is odd"))

    monkeypatch.setattr(loader, "_build", fail)

    with pytest.raises(LoadFailed, match=r"cannot be loaded: heads: 5 is odd$") as caught:
        load(checkpoint("llama"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_config_with_a_wrong_type_is_one_line(tmp_path: Path) -> None:
    CONFIG_MAPPING["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))

    with pytest.raises(CheckpointError, match="'hidden_size' expected int, got str") as caught:
        load(tmp_path, load_format="dummy")
    assert "\n" not in str(caught.value)
