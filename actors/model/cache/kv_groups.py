"""The types in which a model says what it keeps of a request: groups of layers with KV of one shape, planes, states.

- A *group* (LayerGroup) is the layers whose KV has one shape: heads, width of K, width of V. A block of the KV cache is
  the runs of its groups, one after the other.
- A *plane* is one layer's keys and values in its group. Layers are mapped to planes (LayerPlane): a layer that reads
  the KV of another layer has that layer's plane and stores nothing.
- Latent attention is a group of one KV head with a value_size of 0: values are the first numbers of keys.
- A *recurrent state* (RecurrentState) does not grow with the tokens: a fixed number of bytes for each request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one rank whose KV has one shape.

    num_planes:   the layers that store KV of their own
    num_heads, num_kv_heads: query heads, and heads of keys and values, that this rank computes
    key_size:     numbers of a key of one token and head; a query has as many
    value_size:   numbers of a value; 0: nothing is stored, because values are the first numbers of keys
    num_replicas: how many neighbouring ranks hold the same KV head, as in KVCacheLayout
    """

    num_planes: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class LayerPlane:
    """The place of one layer's keys and values.

    layer:     the layer's index in the model, which is AttentionLayer.index
    group:     the index of its group in KVGeometry.groups
    plane:     the index of its plane in the group
    is_stored: whether the layer stores keys and values. False: it reads those of another layer
    """

    layer: int
    group: int
    plane: int
    is_stored: bool = True


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's recurrent state, for one request, on one rank: a convolution's last inputs, for example.

    layer: the layer's index in the model
    name:  tells the tensors of a layer apart, such as "conv" or "recurrent"
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of this tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a request that does not grow with the request's tokens, on one rank.

    parts: in the order in which their bytes follow each other
    """

    parts: tuple[StatePart, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of one request's state."""
        return sum(part.size_bytes for part in self.parts)
