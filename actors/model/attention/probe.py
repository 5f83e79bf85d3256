"""Finds out which attention a model's layers ask for, by running the model once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.batch_attention import AttentionLayer
from actors.model.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a model's KV on one rank, the same for all of its layers.

    num_heads, num_kv_heads: query heads, and heads of keys and values, that this rank computes
    head_dim: numbers in a head's key or value
    layers: what each layer asks of attention, by layer index
    tp_rank, tp_size, num_replicas: see KVCacheLayout
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionLayer, ...]
    tp_rank: int = 0
    tp_size: int = 1
    num_replicas: int = 1

    @property
    def num_layers(self) -> int:
        """How many layers have keys and values of their own."""
        return len(self.layers)

    @property
    def has_sinks(self) -> bool:
        """Whether a layer has attention sinks."""
        return any(layer.has_sinks for layer in self.layers)

    @property
    def is_causal(self) -> bool:
        """Whether, in every layer, a token attends to itself and the tokens before it only."""
        return all(layer.is_causal for layer in self.layers)

    @property
    def sliding_windows(self) -> frozenset[int | None]:
        """The distinct sliding windows of the layers, in tokens; None stands for full attention."""
        return frozenset(layer.sliding_window for layer in self.layers)


class GeometryProbe:
    """Attends without a KV cache, over one sequence that starts at position 0, and records what each layer asks for.

    Implements BatchAttention, for a loaded model that is run before the KV cache exists.
    """

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._layers: dict[int, AttentionLayer] = {}
        self._shapes: set[tuple[int, int, int]] = set()

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Record what the layer asks for, and return a result of the shape that BatchAttention.attend has.

        The result's numbers are not used: they are those of causal attention without window, soft-capping and sinks.
        Raises UnsupportedModel if a layer attends twice, or if keys, values or sinks do not fit the queries.
        """
        if layer.index in self._layers:
            raise UnsupportedModel(self._architecture, f"layer {layer.index} attends more than once")
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise UnsupportedModel(
                self._architecture, f"keys and values differ in shape ({tuple(key.shape)}, {tuple(value.shape)})"
            )
        if key.shape[1] != query.shape[1]:
            raise UnsupportedModel(self._architecture, "keys are not those of the queries' own tokens")
        if sinks is not None and sinks.shape != query.shape[:1]:
            raise UnsupportedModel(
                self._architecture,
                f"its attention sinks are {list(sinks.shape)}, and served is one number for each of its heads",
            )
        self._layers[layer.index] = layer
        self._shapes.add((query.shape[0], key.shape[0], key.shape[2]))
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        return torch.transpose(attended[0], 0, 1)

    def geometry(self) -> KVGeometry:
        """Return the recorded KV shape. Raises UnsupportedModel if the layers do not share one KV shape."""
        if sorted(self._layers) != list(range(len(self._layers))) or not self._layers:
            raise UnsupportedModel(
                self._architecture, f"attention runs in layers {sorted(self._layers)} only, not in every layer"
            )
        if len(self._shapes) != 1:
            raise UnsupportedModel(
                self._architecture, f"its layers differ in (heads, KV heads, head_dim): {sorted(self._shapes)}"
            )
        (num_heads, num_kv_heads, head_dim) = next(iter(self._shapes))
        layers = tuple(self._layers[index] for index in range(len(self._layers)))
        return KVGeometry(num_heads, num_kv_heads, head_dim, layers)
