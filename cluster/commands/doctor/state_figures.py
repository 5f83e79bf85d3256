"""The kinds of a model's layers, and the size of their recurrent states, from the numbers of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RECURRENT: Final = "linear_attention"
"""A layer that keeps a recurrent state and no KV."""
HYBRID: Final = "hybrid"
"""A layer that keeps both."""
NEITHER: Final = "mlp"
"""A layer that keeps nothing of earlier tokens."""

_STATE_DTYPE_BYTES: Final = 4
"""The size of a number of a recurrent state: transformers computes and keeps it in float32."""
_OTHER_NAMES: Final = {"mamba": RECURRENT, "conv": RECURRENT, "moe": NEITHER, "attention": "full_attention"}
_PATTERN: Final = {"M": RECURRENT, "*": "full_attention", "-": NEITHER, "E": NEITHER}
_ALWAYS: Final = {"mamba2": RECURRENT, "falcon_h1": HYBRID}
"""The kind of all layers, by the types of models whose layers are alike."""


def number(text: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is set, as an integer; 0 if none is."""
    return next((int(value) for name in names if (value := text.get(name))), 0)


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind: RECURRENT, HYBRID, NEITHER, or a kind of attention by the name of transformers."""
    num_layers = number(text, "num_hidden_layers", "n_layer")
    if (kind := _ALWAYS.get(str(text.get("model_type")))) is not None:
        return [kind] * num_layers
    if kinds := text.get("layer_types") or text.get("layers_block_type"):
        return [_OTHER_NAMES.get(str(kind), str(kind)) for kind in kinds]
    if pattern := text.get("hybrid_override_pattern"):
        return [_PATTERN.get(letter, NEITHER) for letter in str(pattern)]
    if text.get("model_type") == "bamba":
        attending = set(text.get("attn_layer_indices") or ())
        return ["full_attention" if index in attending else RECURRENT for index in range(num_layers)]
    interval = number(text, "full_attention_interval")
    return [RECURRENT if interval and (index + 1) % interval else "full_attention" for index in range(num_layers)]


def state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Return the bytes of a request's state in all layers; 0 without recurrent layers."""
    num_layers = sum(kind in (RECURRENT, HYBRID) for kind in layer_kinds(text))
    return num_layers * _layer_state_bytes(text, dtype_bytes) if num_layers else 0


def _layer_state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    if number(text, "conv_L_cache"):
        return number(text, "hidden_size") * number(text, "conv_L_cache") * dtype_bytes
    if number(text, "linear_num_value_heads"):
        return _delta_state_bytes(text, dtype_bytes)
    return _mamba_state_bytes(text, dtype_bytes)


def _delta_state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Return the bytes of a layer with a delta rule (Qwen3-Next, Qwen3.5).

    It keeps the last inputs of a convolution, and for each value head a matrix of keys and values.
    """
    num_value_heads = number(text, "linear_num_value_heads")
    key_size, value_size = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
    width = 2 * number(text, "linear_num_key_heads") * key_size + num_value_heads * value_size
    inputs = width * number(text, "linear_conv_kernel_dim") * dtype_bytes
    return inputs + num_value_heads * key_size * value_size * _STATE_DTYPE_BYTES


def _mamba_state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Return the bytes of a Mamba 2 layer: the last inputs of a convolution, and a vector for each inner number."""
    expand = number(text, "mamba_expand", "expand") or 2
    inner = (
        number(text, "mamba_d_ssm")
        or number(text, "mamba_num_heads") * number(text, "mamba_head_dim")
        or expand * number(text, "hidden_size")
    )
    state_size = number(text, "mamba_d_state", "ssm_state_size", "state_size")
    num_groups = number(text, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    width = inner + 2 * num_groups * state_size
    inputs = width * (number(text, "mamba_d_conv", "conv_kernel") or 4) * dtype_bytes
    return inputs + inner * state_size * _STATE_DTYPE_BYTES
