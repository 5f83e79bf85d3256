"""The fields of small checkpoints with recurrent layers, beside those that every family has (tests/checkpoints.py).

A chunk of 16 tokens inside a module is shorter than the tests' prompts, and the sizes of a state's dimensions differ,
so that a mistaken one shows.
"""

from __future__ import annotations

from typing import Any, Final

_MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_DELTA: Final[dict[str, Any]] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_SHORT_CONVOLUTIONS: Final[dict[str, Any]] = {"layer_types": ["conv", "full_attention", "conv"]}

RECURRENT_CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 12, "state_size": 10, "n_groups": 2, "chunk_size": 16},
    ),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    "granite_4_hybrid": (
        "granitemoehybrid",
        _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon_h1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 96}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 10,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_next": ("qwen3_next", _DELTA | _EXPERTS),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _EXPERTS),
    "lfm2": ("lfm2", _SHORT_CONVOLUTIONS),
    "lfm2_moe": (
        "lfm2_moe",
        _SHORT_CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1},
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_d_state": 10,
            "mamba_ngroups": 2,
            "chunk_size": 16,
        },
    ),
}
"""By the family's name: transformers' model type, and the fields."""
