"""Finds out which attention a model's layers ask for, by running the model once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.batch_attention import AttentionLayer, Reach
from actors.model.cache.kv_cache_size import unused_head_dim
from actors.model.cache.kv_groups import LayerGroup, LayerPlane, RecurrentState
from actors.model.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a model's KV on one rank.

    num_heads, num_kv_heads: query heads, and heads of keys and values, that this rank computes, in the first group
    head_dim: numbers in a head's key, in the first group
    layers: what each layer that attends asks of attention, by layer index
    tp_rank, tp_size, num_replicas: see KVCacheLayout; num_replicas is of the first group
    value_size: numbers in a head's value, in the first group; None: head_dim; 0: values are the first numbers of keys
    further_groups: layers whose KV has another shape than the first group's
    planes: where each layer's KV is, by layer index; empty: layer i is plane i of the only group
    state: what the model keeps of a request beside KV; None: nothing
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionLayer, ...]
    tp_rank: int = 0
    tp_size: int = 1
    num_replicas: int = 1
    value_size: int | None = None
    further_groups: tuple[LayerGroup, ...] = ()
    planes: tuple[LayerPlane, ...] = ()
    state: RecurrentState | None = None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """All groups, in their order in a block."""
        value_size = self.head_dim if self.value_size is None else self.value_size
        first = LayerGroup(
            self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, value_size, self.num_replicas
        )
        return (first, *self.further_groups)

    @property
    def num_layers(self) -> int:
        """How many layers of the first group have keys and values of their own."""
        if not self.planes:
            return len(self.layers)
        return sum(plane.group == 0 and plane.is_stored for plane in self.planes)

    @property
    def layer_planes(self) -> dict[int, LayerPlane]:
        """The place of each layer's KV, by the layer's index in the model."""
        if not self.planes:
            return {layer.index: LayerPlane(layer.index, 0, layer.index) for layer in self.layers}
        return {plane.layer: plane for plane in self.planes}

    @property
    def reaches_of_groups(self) -> tuple[frozenset[Reach], ...]:
        """For each group, the distinct reaches of the layers that read its KV."""
        planes = self.layer_planes
        return tuple(
            frozenset(layer.reach for layer in self.layers if planes[layer.index].group == group)
            for group in range(len(self.groups))
        )

    @property
    def irregularity(self) -> str | None:
        """The reason why backends that need a plane for each layer in one tensor do not serve the model, or None."""
        if self.state is not None:
            return "it keeps recurrent states"
        if self.value_size == 0:
            return "it has latent attention (MLA)"
        if self.further_groups:
            return f"its layers form {len(self.groups)} groups with KV of different shapes"
        if self.value_size not in (None, self.head_dim):
            return f"keys have {self.head_dim} numbers and values {self.value_size}"
        if self.planes:
            return "some of its layers have no KV of their own"
        if any(layer.chunk_size is not None for layer in self.layers):
            return "some of its layers attend within chunks"
        return None

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

    def __init__(self, architecture: str, *, finds_sharing: bool = True) -> None:
        """finds_sharing: whether to find layers that read other layers' KV, for which the probe keeps all KV"""
        self._architecture = architecture
        self._finds_sharing = finds_sharing
        self._layers: dict[int, AttentionLayer] = {}
        self._shapes: dict[int, tuple[int, int, int, int]] = {}
        self._sources: dict[int, int] = {}
        """For each layer that reads another layer's KV, that layer."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Record what the layer asks for, and return a result of the shape that BatchAttention.attend has.

        The result's numbers are not used: they are those of causal attention without window, soft-capping and sinks.
        Raises UnsupportedModel if a layer attends twice, or if keys, values or sinks do not fit the queries.
        """
        if layer.index in self._layers:
            raise UnsupportedModel(self._architecture, f"layer {layer.index} attends more than once")
        if key.shape[:2] != value.shape[:2] or key.shape[-1] != query.shape[-1]:
            raise UnsupportedModel(
                self._architecture,
                f"queries, keys and values do not fit each other ({tuple(query.shape)}, {tuple(key.shape)}, "
                f"{tuple(value.shape)})",
            )
        if layer.value_size not in (None, value.shape[-1]):
            raise UnsupportedModel(self._architecture, f"values are {value.shape[-1]} wide, not {layer.value_size}")
        if key.shape[1] != query.shape[1]:
            raise UnsupportedModel(self._architecture, "keys are not those of the queries' own tokens")
        if sinks is not None and sinks.shape != query.shape[:1]:
            raise UnsupportedModel(
                self._architecture,
                f"its attention sinks are {list(sinks.shape)}, and raypd serves one number for each head",
            )
        self._layers[layer.index] = layer
        stored_value_size = value.shape[2] if layer.value_size is None else 0
        self._shapes[layer.index] = (query.shape[0], key.shape[0], key.shape[2], stored_value_size)
        if self._finds_sharing:
            self._find_source(layer.index, key, value)
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        return torch.transpose(attended[0], 0, 1)

    def _find_source(self, index: int, key: Tensor, value: Tensor) -> None:
        """Note whether the layer is given the KV of an earlier layer: it is in the same memory then.

        The probe keeps the KV, so that no later layer gets the same memory for KV of its own.
        """
        for source, (other_key, other_value) in self._kept.items():
            if key.is_set_to(other_key) and value.is_set_to(other_value):
                self._sources[index] = source
                return
        self._kept[index] = (key, value)

    def geometry(
        self, num_replicas_of: Callable[[int], int] = lambda layer: 1, state: RecurrentState | None = None
    ) -> KVGeometry:
        """Return the recorded KV shape. Raises UnsupportedModel if a layer neither attends nor may be recurrent.

        state: what recurrent layers keep of a request; None if the model has none, so that every layer has to attend
        num_replicas_of: how many ranks hold the same KV head of a layer. Layers that are alike on one rank form two
            groups if the ranks share the heads of one, and have heads of their own of the other
        """
        if state is not None and not self._layers:
            return _geometry_without_attention(state)
        if state is None and (sorted(self._layers) != list(range(len(self._layers))) or not self._layers):
            raise UnsupportedModel(
                self._architecture, f"attention runs in layers {sorted(self._layers)} only, not in every layer"
            )
        layers = tuple(self._layers[index] for index in sorted(self._layers))
        stored = [layer.index for layer in layers if layer.index not in self._sources]
        kinds = {index: (*self._shapes[index], num_replicas_of(index)) for index in stored}
        shapes = list(dict.fromkeys(kinds.values()))
        members = [[index for index in stored if kinds[index] == shape] for shape in shapes]
        planes = {
            index: LayerPlane(index, group, plane)
            for group, indices in enumerate(members)
            for plane, index in enumerate(indices)
        }
        for index, source in self._sources.items():
            if self._shapes[index] != self._shapes[source]:
                raise UnsupportedModel(
                    self._architecture, f"layer {index} reads the KV of layer {source} with another number of heads"
                )
            planes[index] = LayerPlane(index, planes[source].group, planes[source].plane, is_stored=False)
        is_one_to_one = len(shapes) == 1 and not self._sources and stored == list(range(len(stored)))
        groups = [LayerGroup(len(indices), *shape) for shape, indices in zip(shapes, members, strict=True)]
        first = groups[0]
        return KVGeometry(
            first.num_heads,
            first.num_kv_heads,
            first.key_size,
            layers,
            num_replicas=first.num_replicas,
            value_size=None if first.value_size == first.key_size else first.value_size,
            further_groups=tuple(groups[1:]),
            planes=() if is_one_to_one else tuple(planes[index] for index in sorted(planes)),
            state=state,
        )


def _geometry_without_attention(state: RecurrentState) -> KVGeometry:
    """Return the geometry of a model that keeps a state of each request, and nothing of each token.

    The cache is made of blocks of tokens all the same.
    """
    return KVGeometry(1, 1, unused_head_dim(state.size_bytes), (), planes=(LayerPlane(0, 0, 0),), state=state)
