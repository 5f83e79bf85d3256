"""The numbers of published config.json files from which the sizes of a KV cache follow."""

from __future__ import annotations

from typing import Any, Final

_WINDOWED, _FULL = "sliding_attention", "full_attention"

GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    "gpt-oss-20b": {
        "dtype": "bfloat16",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": [_WINDOWED, _FULL] * 12,
    },
    "DeepSeek-V3": {
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "Qwen3-Next-80B": {
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "Gemma 4 31B": {
        "dtype": "bfloat16",
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": ([_WINDOWED] * 5 + [_FULL]) * 10,
    },
    "Llama-3.3-70B": {
        "dtype": "bfloat16",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""By model; what the sizes do not depend on is left out."""
