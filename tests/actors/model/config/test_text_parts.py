"""Models with encoders for images or sound are read as their text part; tests/models has the tokens that they give."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from actors.config import ModelConfig
from actors.model.checks.self_check import stock_attention
from actors.model.config.config_rules import quantization_settings, read_config, reason_in_config
from actors.model.config.model_kind import ModelKind, kind_of
from actors.model.config.text_parts import SERVED_AS_TEXT, as_text_part, left_out_inputs
from actors.model.errors import CheckpointError
from actors.model.loader import LoadedModel, load_model
from tests.checkpoints import write_checkpoint
from tests.models.tiny_configs import tiny_config
from tests.multimodal import MultimodalClass
from tests.reference import load_model as load_whole
from tests.reference import logprobs_after, random_prompt


def written(model_type: str, directory: Path, **fields: Any) -> Path:
    config = tiny_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    return write_checkpoint(config, directory, auto_class=MultimodalClass)


def settings(directory: Path) -> ModelConfig:
    """Plain weights: those of the file can be compared, and products round as those of the whole model do.

    The models drawn here amplify rounding: packed and plain logits, both right, differ by up to 3e-3.
    """
    return ModelConfig(model=str(directory), dtype="float32", device="cpu", weight_packing="none")


@torch.inference_mode()
def logits(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    with stock_attention(loaded.forward.model):
        return loaded.forward.stock(torch.tensor(prompt))


@pytest.mark.parametrize("model_type", SERVED_AS_TEXT)
def test_the_text_part_is_a_language_model_that_says_what_it_leaves_out(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    config = read_config(tmp_path, trust_remote_code=False)
    assert reason_in_config(config) is None
    assert kind_of(config) is ModelKind.GENERATION
    assert left_out_inputs(config) == ("images and sound" if model_type.startswith("gemma") else "images")


def test_the_whole_models_config_says_what_holds_for_all_parts() -> None:
    whole = tiny_config("qwen3_5")
    whole.dtype, whole.tie_word_embeddings, whole.eos_token_id = torch.bfloat16, True, [3, 4]
    whole.architectures = ["Qwen3_5ForConditionalGeneration"]
    text = as_text_part(whole)
    assert (text.dtype, text.tie_word_embeddings, text.eos_token_id) == (torch.bfloat16, True, [3, 4])
    assert text.architectures == whole.architectures
    assert not whole.text_config.tie_word_embeddings, "the config that was read stays as it was"


def test_the_names_of_layers_in_quantization_settings_are_those_of_the_text_part() -> None:
    whole = tiny_config("qwen3_5")
    whole.quantization_config = {
        "quant_method": "compressed-tensors",
        "ignore": [
            "lm_head",
            "model.visual.blocks.0.mlp",
            "model.language_model.layers.0.linear_attn.in_proj_a",
            r"re:model\.language_model\.layers\.1\..*",
            "re:.*language_model.*norm",
            "language_model.model.layers.2.mlp.gate",
            "language_model.lm_head",
        ],
        "weight_block_size": [8, 8],
    }
    found = quantization_settings(as_text_part(whole))
    assert found["ignore"] == [
        "lm_head",
        "model.visual.blocks.0.mlp",
        "model.layers.0.linear_attn.in_proj_a",
        r"re:model\.layers\.1\..*",
        "re:.*.*norm",
        "model.layers.2.mlp.gate",
        "lm_head",
    ]
    assert found["weight_block_size"] == [8, 8]


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "llama", "qwen3_5_text", "gemma3"])
def test_other_models_stay_as_they_are(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    assert as_text_part(config) is config
    assert left_out_inputs(config) == ""


def test_another_head_is_no_reason_to_read_the_text_part() -> None:
    config = tiny_config("qwen3_5")
    config.architectures = ["Qwen3_5ForSequenceClassification"]
    assert as_text_part(config) is config
    assert "more than text" in str(reason_in_config(config))


def test_the_weights_of_encoders_are_left_out_and_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = written("qwen3_5", tmp_path, tie_word_embeddings=True)
    file = directory / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    assert any(name.startswith("model.visual.") for name in weights)

    with caplog.at_level(logging.INFO):
        loaded = load_model(settings(directory))

    assert loaded.left_out_inputs == "images"
    served = dict(loaded.forward.model.named_parameters())
    whole = {
        name.replace("language_model.", ""): weight
        for name, weight in load_whole(directory).named_parameters()
        if "visual" not in name
    }
    assert served.keys() == whole.keys()
    assert all(torch.equal(weight, whole[name]) for name, weight in served.items())
    [line] = [record for record in caplog.records if "only the model's text part is served" in record.message]
    assert line.__dict__["left_out"] == "images"
    prompt = random_prompt(9)
    logprobs = torch.log_softmax(logits(loaded, prompt), dim=-1)
    torch.testing.assert_close(logprobs, logprobs_after(directory, tuple(prompt)), rtol=1e-4, atol=1e-3)
    assert load_whole(directory).config.model_type == "qwen3_5", "the reference has its encoders"

    save_file(weights | {"model.language_model.layers.0.extra.weight": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has weights that this model does not read.*layers\.0\.extra\.weight"):
        load_model(settings(directory))


@pytest.mark.more
def test_fp8_blocks_are_dequantized_but_in_layers_that_the_settings_leave_out(tmp_path: Path) -> None:
    directory = written("qwen3_5", tmp_path / "plain")
    config, weights = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    left_out = "model.language_model.layers.0.mlp.down_proj"
    quantized, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        owner = name.removesuffix(".weight")
        if not owner.startswith("model.language_model.") or not owner.endswith("_proj") or owner == left_out:
            continue
        scale = weight.abs().max().reshape(1, 1) / 448.0
        quantized[name] = (weight / scale).to(torch.float8_e4m3fn)
        quantized[f"{owner}.weight_scale_inv"] = scale
        plain[name] = quantized[name].float() * scale
    assert len(quantized) > len(plain)
    save_file(plain, directory / "model.safetensors", {"format": "pt"})

    other = written("qwen3_5", tmp_path / "quantized")
    save_file(quantized, other / "model.safetensors", {"format": "pt"})
    settings_of_fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [left_out]}
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": settings_of_fp8}))

    ours = logits(load_model(settings(other)), random_prompt(9))
    torch.testing.assert_close(ours, logits(load_model(settings(directory)), random_prompt(9)), rtol=1e-4, atol=1e-3)
