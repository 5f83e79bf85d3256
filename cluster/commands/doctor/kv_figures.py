"""The sizes of a model's KV cache and of its handoffs, from the numbers of config.json. Pure arithmetic.

A token of KV has, in each layer that attends, a key and a value for each KV head. Latent attention (MLA) keeps one
vector for all heads and no value. Layers with a recurrent state keep a fixed number of bytes for each request instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from actors.model.cache.kv_cache_size import unused_head_dim
from cluster.commands.doctor.findings import GIB
from cluster.commands.doctor.state_figures import NEITHER, RECURRENT, layer_kinds, number, state_bytes
from kv_transfer.layout import rank_kv_heads


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV of a token: num_kv_heads times a key and a value, of so many numbers."""

    num_kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class KVFigures:
    """The layers of a model that keep KV, and the sizes that follow.

    layers:      how many layers of each kind store KV; a layer that reads another layer's KV stores none; a model that
        keeps recurrent states only has one, in which nothing is stored
    dtype_bytes: of a number of the KV cache
    block_size:  tokens of a block
    state_bytes: of a request's recurrent state, all layers
    """

    layers: Mapping[LayerKV, int]
    dtype_bytes: int
    block_size: int
    state_bytes: int = 0

    def num_state_blocks(self, tp_size: int = 1) -> int:
        """How many blocks the recurrent state of a request takes, if any layer keeps KV."""
        size_bytes = self.block_size * self.rank_bytes_per_token(tp_size)
        return -(-self.state_bytes // size_bytes) if size_bytes else 0

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
    layers, num_state_bytes = Counter(_layers(text)), state_bytes(text, dtype_bytes)
    if not layers and num_state_bytes:
        head_dim = unused_head_dim(num_state_bytes)
        layers[LayerKV(1, head_dim, head_dim)] = 1
    return KVFigures(layers, dtype_bytes, block_size, num_state_bytes)


def _layers(text: Mapping[str, Any]) -> Iterator[LayerKV]:
    """Yield the KV of each layer that stores any."""
    num_layers = number(text, "num_hidden_layers", "n_layer")
    if number(text, "kv_lora_rank"):
        # LongCat-Flash's config counts decoder layers, each of which attends twice.
        num_layers = num_layers or 2 * number(text, "num_layers")
        yield from [LayerKV(1, number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim"), 0)] * num_layers
        return
    # transformers writes the layers that differ from the others under their numbers.
    own_fields: Mapping[str, Any] = text.get("per_layer_config") or {}
    kinds = layer_kinds(text)
    for index, kind in enumerate(kinds[: len(kinds) - number(text, "num_kv_shared_layers")]):
        if kind not in (RECURRENT, NEITHER):
            yield _attention_layer({**text, **own_fields.get(str(index), {})}, kind)


def _attention_layer(text: Mapping[str, Any], kind: str) -> LayerKV:
    num_heads = number(text, "num_attention_heads", "n_head")
    num_kv_heads = number(text, "num_key_value_heads") or num_heads
    head_dim = number(text, "head_dim") or number(text, "hidden_size", "n_embd") // max(num_heads, 1)
    if text.get("model_type") == "zamba2":
        # Its attention reads two vectors of the model's width.
        head_dim = 2 * number(text, "hidden_size") // max(num_heads, 1)
    if kind == "sliding_attention" and text.get("model_type") == "mimo_v2_flash":
        # transformers' class doubles them in the layers with a window.
        num_kv_heads *= 2
    if kind == "full_attention" and (wider := number(text, "global_head_dim")):
        # Gemma 4: the layers with full attention have other heads than those with a window.
        has_own_heads = text.get("attention_k_eq_v", False)
        num_kv_heads = (number(text, "num_global_key_value_heads") if has_own_heads else 0) or num_kv_heads
        head_dim = wider
    return LayerKV(num_kv_heads, head_dim, number(text, "v_head_dim") or head_dim)
