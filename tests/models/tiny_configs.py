"""A small config of each causal language model type of transformers: its default config, with small numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checkpoints import EOS_TOKEN_ID, MAX_POSITIONS, SLIDING_WINDOW, VOCAB_SIZE
from tests.multimodal import ENCODERS

MODEL_TYPES: Final = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)))
"""All causal language model types of the installed transformers."""

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 96, 4, 4, 2, 16
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "n_positions": MAX_POSITIONS,
    "n_ctx": MAX_POSITIONS,
    "max_seq_len": MAX_POSITIONS,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim", "embedding_size"), _HIDDEN),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_hidden_size"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels"), _HEAD_DIM),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": SLIDING_WINDOW,
}
"""The numbers that a config gets where it has such a field and its default is not None."""

_SHARED_KV: Final[dict[str, Any]] = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 2 * _HIDDEN // 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_DELTA: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: Final[dict[str, Any]] = {"num_key_value_heads": _HEADS}
_OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "ctrl": {"dff": _INNER},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma3n": ENCODERS["gemma3n"] | {"text_config": _SHARED_KV},
    "gemma3n_text": _SHARED_KV,
    "gemma4": ENCODERS["gemma4"] | {"text_config": _SHARED_KV | {"use_bidirectional_attention": "vision"}},
    "gemma4_text": _SHARED_KV,
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 2 * _HIDDEN},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": _HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": _HEAD_DIM},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4": ENCODERS["llama4"],
    "longcat_flash": _LATENT | {"head_dim": 8, "num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "minicpm3": _LATENT,
    "ministral": {"head_dim": _HEAD_DIM},
    "nemotron": {"num_key_value_heads": _KV_HEADS},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen3_5": ENCODERS["qwen3_5"] | {"text_config": _DELTA},
    "qwen3_5_moe": ENCODERS["qwen3_5_moe"] | {"text_config": _DELTA},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "youtu": _LATENT,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": _HEADS,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": _KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": _HIDDEN, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {"num_key_value_heads": _HEADS, "hidden_size": 5120}},
    "dots3_note_text": {"num_key_value_heads": _HEADS},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
}
"""By model type: fields that make a small config fit together, or turn on what its published checkpoints have."""

_WITHOUT_DEFAULT: Final = {"gemma4_assistant"}
"""The model types whose default config their own class refuses."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return the small config of a model type. Raises what its class raises if the numbers do not fit together."""
    config_class, overrides = CONFIG_MAPPING[model_type], _OVERRIDES.get(model_type, {})
    default = config_class(**overrides) if model_type in _WITHOUT_DEFAULT else config_class()
    fields = _small_fields(default) | overrides
    if isinstance(text := getattr(default, "text_config", None), PretrainedConfig):
        fields["text_config"] = {"model_type": text.model_type} | _small_fields(text) | overrides.get("text_config", {})
    config: PretrainedConfig = config_class(**fields)
    return config


def _small_fields(default: PretrainedConfig) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(default)}
    small = {name: value for name, value in _SMALL.items() if name in names and _is_set(default, name)}
    return small | ({"is_decoder": True} if "is_decoder" in names else {})


def _is_set(config: PretrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:
        # transformers raises if the field may differ from layer to layer.
        return True
