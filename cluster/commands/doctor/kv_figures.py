"""The sizes of a model's KV cache and of its handoffs, from the numbers of config.json. Pure arithmetic.

A token of KV has, in each layer that attends, a key and a value for each KV head. Latent attention (MLA) keeps one
vector for all heads and no value. Layers with a recurrent state keep a fixed number of bytes for each request instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.commands.doctor.findings import GIB
from kv_transfer.layout import rank_kv_heads

_RECURRENT_STATE_BYTES: Final = 4
"""The size of a number of a recurrent state: transformers computes and keeps it in float32."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV of a token: num_kv_heads times a key and a value, of so many numbers."""

    num_kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class KVFigures:
    """The layers of a model that keep KV, and the sizes that follow.

    layers:      how many layers of each kind store KV; a layer that reads another layer's KV stores none
    dtype_bytes: of a number of the KV cache
    block_size:  tokens of a block
    state_bytes: of a request's recurrent state, all layers
    """

    layers: Mapping[LayerKV, int]
    dtype_bytes: int
    block_size: int
    state_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token over all ranks, each head once."""
        return self.rank_bytes_per_token(1)

    def rank_bytes_per_token(self, tp_size: int) -> int:
        """KV bytes of a token on one of tp_size ranks. Raises ValueError if the KV heads cannot be shared by them."""
        numbers = (
            count * len(rank_kv_heads(layer.num_kv_heads, tp_size, 0)) * (layer.key_size + layer.value_size)
            for layer, count in self.layers.items()
        )
        return sum(numbers) * self.dtype_bytes

    def transfer_bytes_per_token(self, tp_size: int) -> int:
        """KV bytes of a token that a handoff moves to a decode engine of tp_size ranks: every rank gets its heads."""
        return tp_size * self.rank_bytes_per_token(tp_size)

    def blocks_per_gib(self, tp_size: int = 1) -> int:
        """How many blocks a GiB of one rank's memory holds; 0 if no layer keeps KV."""
        size_bytes = self.block_size * self.rank_bytes_per_token(tp_size)
        return GIB // size_bytes if size_bytes else 0


def kv_figures(text: Mapping[str, Any], *, dtype_bytes: int, block_size: int) -> KVFigures:
    """Return the figures of a model. text: config.json, or its text_config"""
    layers = Counter(_layers(text))
    return KVFigures(layers, dtype_bytes, block_size, _state_bytes(text, dtype_bytes))


def _layers(text: Mapping[str, Any]) -> Iterator[LayerKV]:
    """Yield the KV of each layer that stores any."""
    num_layers = _number(text, "num_hidden_layers", "n_layer")
    if _number(text, "kv_lora_rank"):
        # LongCat-Flash's config counts decoder layers, each of which attends twice.
        num_layers = num_layers or 2 * _number(text, "num_layers")
        yield from [LayerKV(1, _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim"), 0)] * num_layers
        return
    # transformers writes the layers that differ from the others under their numbers.
    own_fields: Mapping[str, Any] = text.get("per_layer_config") or {}
    for index, kind in enumerate(_kinds(text, num_layers)[: num_layers - _number(text, "num_kv_shared_layers")]):
        if not kind.startswith("linear"):
            yield _attention_layer({**text, **own_fields.get(str(index), {})}, kind)


def _attention_layer(text: Mapping[str, Any], kind: str) -> LayerKV:
    num_heads = _number(text, "num_attention_heads", "n_head")
    num_kv_heads = _number(text, "num_key_value_heads") or num_heads
    head_dim = _number(text, "head_dim") or _number(text, "hidden_size", "n_embd") // max(num_heads, 1)
    if kind == "sliding_attention" and text.get("model_type") == "mimo_v2_flash":
        # transformers' class doubles them in the layers with a window.
        num_kv_heads *= 2
    if kind == "full_attention" and (wider := _number(text, "global_head_dim")):
        # Gemma 4: the layers with full attention have other heads than those with a window.
        has_own_heads = text.get("attention_k_eq_v", False)
        num_kv_heads = (_number(text, "num_global_key_value_heads") if has_own_heads else 0) or num_kv_heads
        head_dim = wider
    return LayerKV(num_kv_heads, head_dim, _number(text, "v_head_dim") or head_dim)


def _kinds(text: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind, by the name that transformers gives it."""
    if kinds := text.get("layer_types"):
        return [str(kind) for kind in kinds]
    interval = _number(text, "full_attention_interval")
    return ["linear_attention" if interval and (i + 1) % interval else "full_attention" for i in range(num_layers)]


def _state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Return the bytes of a request's state in layers with a delta rule (Qwen3-Next, Qwen3.5); 0 without any.

    Each of them keeps the last inputs of a convolution, and for each value head a matrix of keys and values.
    """
    num_layers = _kinds(text, _number(text, "num_hidden_layers")).count("linear_attention")
    if not (num_value_heads := _number(text, "linear_num_value_heads")):
        return 0
    key_size, value_size = _number(text, "linear_key_head_dim"), _number(text, "linear_value_head_dim")
    width = 2 * _number(text, "linear_num_key_heads") * key_size + num_value_heads * value_size
    inputs = width * _number(text, "linear_conv_kernel_dim") * dtype_bytes
    return num_layers * (inputs + num_value_heads * key_size * value_size * _RECURRENT_STATE_BYTES)


def _number(text: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is set, as an integer; 0 if none is."""
    return next((int(value) for name in names if (value := text.get(name))), 0)
