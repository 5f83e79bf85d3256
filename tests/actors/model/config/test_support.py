"""A model that cannot be served is refused at start, with the architecture's name and the reason.

Tests of actors/model/config/config_rules.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from actors.config import ModelConfig
from actors.model.errors import UnsupportedModel
from actors.model.loader import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_OLD: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
MOE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": (
        {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
        "encoder-decoder",
    ),
    "mamba": ({"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "rwkv": ({"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "jamba": (SMALL | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, "linear_attention"),
    "deepseek_v32": (SMALL | MLA | MOE, "chooses by an indexer which tokens it reads"),
    "glm_moe_dsa": (SMALL | MLA | MOE, "chooses by an indexer which tokens it reads"),
    "axk1": (SMALL | MLA | MOE, "is of a kind that is not served (axk1)"),
    "bloom": (SMALL_OLD, "AttentionInterface"),
    "falcon": (SMALL_OLD | {"alibi": True}, "ALiBi"),
    "mpt": ({"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 4}, "AttentionInterface"),
    "bert": (SMALL | {"is_decoder": False}, "not causal"),
    "roberta": (SMALL | {"is_decoder": True}, "positions from the one after its padding token"),
    "gemma3": ({}, "more than text"),
    "gemma3_text": (SMALL | {"head_dim": 8, "use_bidirectional_attention": True}, "bidirectional"),
    "gpt2": (
        {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True},
        "cross-attention",
    ),
    "diffllama": (SMALL, "attends more than once"),
    "phimoe": (
        SMALL | {"sliding_window": 16, "num_local_experts": 2},
        "its config names a sliding window of 16 in lay",
    ),
    "moshi": (SMALL | {"sliding_window": 16}, "its config names a sliding window of 16 in layers [0, 1]"),
    "qwen2_moe": (
        SMALL | WINDOW | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
        "its config names a sliding window of 16 in layers [0], but",
    ),
}


def dummy(model_type: str, settings: dict[str, Any], directory: Path, **model_settings: object) -> ModelConfig:
    CONFIG_MAPPING[model_type](**settings).save_pretrained(directory)
    fields = {"model": str(directory), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    return ModelConfig.model_validate(fields | model_settings)


@pytest.mark.parametrize("model_type", REFUSED)
def test_architecture_is_refused_with_its_reason(model_type: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[model_type]

    with pytest.raises(UnsupportedModel) as refusal:
        load_model(dummy(model_type, settings, tmp_path))

    assert reason in str(refusal.value)
    assert str(refusal.value).startswith(model_type)


def test_the_architecture_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    config = dummy("falcon", SMALL_OLD | {"alibi": True, "architectures": ["FalconForCausalLM"]}, tmp_path)

    with pytest.raises(UnsupportedModel, match=r"^FalconForCausalLM cannot be served: it uses ALiBi"):
        load_model(config)


@pytest.mark.parametrize("model_type", ["phimoe", "moshi"])
def test_a_window_that_no_sequence_reaches_is_no_hindrance(model_type: str, tmp_path: Path) -> None:
    settings, _ = REFUSED[model_type]

    assert load_model(dummy(model_type, settings | {"sliding_window": 128}, tmp_path)).max_model_len == 128


@pytest.mark.parametrize("model_type", ["gpt_neox", "cohere", "phi", "olmo2", "granite", "gpt_bigcode", "starcoder2"])
def test_other_causal_models_pass_the_self_check(model_type: str, tmp_path: Path) -> None:
    old_names = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

    loaded = load_model(dummy(model_type, old_names if model_type == "gpt_bigcode" else SMALL, tmp_path))

    assert loaded.geometry.num_layers == 2
    assert loaded.max_model_len == 128


def test_longrope_beyond_its_original_length_is_refused_with_the_setting_that_serves_it(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    settings = SMALL | {"rope_parameters": rope, "original_max_position_embeddings": 64}

    for wanted in (None, 100):
        with pytest.raises(UnsupportedModel, match=r"LongRoPE.*set model\.max_model_len to 64 or less"):
            load_model(dummy("phi3", settings, tmp_path, max_model_len=wanted))
    assert load_model(dummy("phi3", settings, tmp_path, max_model_len=64)).max_model_len == 64
    assert load_model(dummy("phi3", settings | {"max_position_embeddings": 64}, tmp_path)).max_model_len == 64


def test_a_hybrid_model_whose_layers_all_attend_is_served(tmp_path: Path) -> None:
    # Granite 4.0 Micro's config calls them "attention".
    hybrid = {"layer_types": ["attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 8}

    assert load_model(dummy("granitemoehybrid", SMALL | hybrid, tmp_path)).geometry.num_layers == 2
