"""Tests of actors/model/attention/probe.py, actors/model/checks/fingerprint.py, actors/model/config/limits.py,
actors/model/errors.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.config import ModelConfig
from actors.model.attention import torch_backend
from actors.model.attention.batch_attention import AttentionLayer
from actors.model.errors import CheckpointError, SelfCheckFailed, UnsupportedModel
from actors.model.loader import LoadedModel, load_model
from tests.checkpoints import EOS_TOKEN_ID, MAX_POSITIONS, SLIDING_WINDOW, VOCAB_SIZE, family_config, make_checkpoint
from tests.vision import make_vision_checkpoint

CheckpointOf = Callable[[str], Path]


def load(directory: Path, **settings: object) -> LoadedModel:
    return load_model(ModelConfig.model_validate({"model": str(directory), "device": "cpu"} | settings))


def test_what_the_engine_needs_to_know_is_read_from_the_checkpoint(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("gemma3"))

    assert loaded.architecture == "Gemma3ForCausalLM"
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (
        VOCAB_SIZE,
        MAX_POSITIONS,
        (EOS_TOKEN_ID,),
    )
    geometry = loaded.geometry
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == (4, 2, 16)
    assert [layer.sliding_window for layer in geometry.layers] == [SLIDING_WINDOW, SLIDING_WINDOW, None]


def test_all_eos_tokens_of_the_generation_config_count(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))

    assert load(directory).eos_token_ids == (5, 7)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2", "mamba2", "nemotron_h"])
def test_half_precision_passes_the_self_check(family: str, checkpoint: CheckpointOf) -> None:
    assert load(checkpoint(family), dtype="bfloat16").dtype == torch.bfloat16


def test_missing_files_are_named(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path)
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        load(tmp_path)


def test_unreadable_files_are_named(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match=r"the weights in .* cannot be loaded"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used"):
        load(directory)


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"lacks weights.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(directory)


def test_longer_sequences_than_the_model_has_positions_are_refused(checkpoint: CheckpointOf) -> None:
    assert load(checkpoint("gpt2"), max_model_len=100).max_model_len == 100
    with pytest.raises(UnsupportedModel, match=f"max_model_len is {MAX_POSITIONS + 1}, but at most {MAX_POSITIONS}"):
        load(checkpoint("gpt2"), max_model_len=MAX_POSITIONS + 1)


def test_dummy_weights_follow_the_seed_and_leave_the_global_generator_alone(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    models = [load(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2)]

    assert torch.equal(torch.rand(1), expected)
    weights = [next(model.forward.model.parameters()) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert models[0].fingerprint == models[1].fingerprint != models[2].fingerprint


def test_the_fingerprint_tells_models_apart(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = checkpoint("llama")
    same = load(shutil.copytree(directory, tmp_path / "copy"))
    other_weights = load(make_checkpoint("llama", tmp_path / "seed", seed=1))
    other_config = load(make_checkpoint("llama", tmp_path / "theta", rms_norm_eps=1e-5))
    fingerprint = load(directory).fingerprint

    assert same.fingerprint == fingerprint
    assert len({fingerprint, other_weights.fingerprint, other_config.fingerprint}) == 3
    assert load(directory, dtype="bfloat16").fingerprint != fingerprint


def test_a_model_that_computes_otherwise_than_transformers_is_refused(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = torch_backend._attend

    def ignore_scaling(
        layer: AttentionLayer, query: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        return attend(layer, query * 1.1, cached, mask, sinks)

    monkeypatch.setattr(torch_backend, "_attend", ignore_scaling)

    with pytest.raises(SelfCheckFailed, match="LlamaForCausalLM cannot be served: its logits"):
        load(checkpoint("llama"))


def test_a_sliding_window_that_attention_is_not_told_of_is_refused(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))

    with pytest.raises(UnsupportedModel, match=r"names a sliding window of 64 in layers \[0, 1, 2\]"):
        load(directory)


def test_a_language_model_of_several_groups_of_layers_is_refused_with_images(tmp_path: Path) -> None:
    make_vision_checkpoint("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    vocab_size = config["text_config"]["vocab_size"]
    config["text_config"] = family_config("mimo", vocab_size=vocab_size).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModel, match="which is not served for models with images"):
        load(tmp_path, load_format="dummy")


def test_models_may_be_loaded_in_several_threads_at_once(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    dtypes = ["float32", "bfloat16", "float16"] * 8
    before = torch.get_default_dtype()
    with ThreadPoolExecutor(len(dtypes)) as threads:
        models = list(threads.map(lambda dtype: load(directory, dtype=dtype), dtypes))
    assert [str(model.dtype) for model in models] == [f"torch.{dtype}" for dtype in dtypes]
    assert torch.get_default_dtype() is before
