"""Attention with torch's own operations, on any device.

Keys and values are gathered from their blocks into a buffer, then torch's scaled_dot_product_attention computes the
result. The buffer is reused from layer to layer and step to step, since fresh memory costs page faults, and was three
times slower when measured. The query heads that share a KV head become rows of one query matrix, so keys are never
repeated for each head.

The backend serves every geometry: groups of layers with KV of different shapes, layers that read the KV of another
layer, values that are the first numbers of keys (latent attention), and attention within chunks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.batch_plan import (
    CacheShape,
    DecodeBucket,
    PrefillSegment,
    begun_blocks,
    plan_reach,
    plan_writes,
    token_slots,
)
from actors.model.attention.cascade import attend_with_shared_prefix
from actors.model.attention.latent_heads import LatentHeads, attend_sequence
from actors.model.attention.probe import KVGeometry
from actors.model.attention.sinks import softmax_with_sinks
from actors.model.cache.group_memory import GroupMemory, group_memories, rows_of
from actors.model.cache.kv_groups import LayerPlane
from actors.model.uploads import upload
from kv_transfer.device_kind import is_accelerator
from kv_transfer.layout import KeyOrder

_TRANSPOSED_BUFFER = 4
"""The buffer that holds gathered keys of the transposed order, before they are turned round into their own buffer."""
_MAX_SCORES: Final = 1 << 24
"""The most scores that are in memory at once where torch's fused attention cannot compute them: 64 MiB in float32."""


class TorchKind:
    """The backend for any model on any device. Implements AttentionBackendKind."""

    name = BackendName.TORCH

    def key_orders(self, needs: AttentionNeeds) -> tuple[KeyOrder, ...]:
        """See AttentionBackendKind."""
        if not is_accelerator(needs.device):
            return (KeyOrder.PLAIN, KeyOrder.TRANSPOSED)
        return (KeyOrder.PLAIN,)

    def find_obstacle(self, needs: AttentionNeeds) -> str | None:
        """See AttentionBackendKind."""
        return None

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> TorchAttention:
        """See AttentionBackendKind."""
        return TorchAttention(kv_cache, needs.geometry, needs.block_size, key_order=needs.key_order)


class GroupTensors:
    """The views of one group's part of a KV cache; batch_plan.py describes them.

    tiles and rows of values are those of keys if the group stores no values.
    """

    def __init__(self, kv_cache: Tensor, memory: GroupMemory, key_order: KeyOrder) -> None:
        self.memory = memory
        self.shape = CacheShape(memory, kv_cache.dtype, kv_cache.device, key_order)
        value_size, value_unit = memory.value_size or memory.key_size, memory.value_unit or memory.key_unit
        self.key_tiles = rows_of(kv_cache, memory.key_tile, memory.tile_unit)
        self.value_tiles = rows_of(kv_cache, memory.block_size * value_size, memory.tile_unit)
        self.key_rows = rows_of(kv_cache, memory.key_size, memory.key_unit)
        if key_order is not KeyOrder.PLAIN:
            # Row i begins at number i of the cache, and the numbers of a key are one tile's tokens apart.
            num_rows = kv_cache.numel() - (memory.key_size - 1) * memory.block_size
            self.key_rows = kv_cache.view(-1).as_strided((num_rows, memory.key_size), (1, memory.block_size))
        self.value_rows = rows_of(kv_cache, value_size, value_unit)

    def keys_from(self, plane: int, unit: int) -> int:
        """Return how many units of numbers the keys of this plane come after those of plane 0."""
        return plane * self.memory.plane_size // unit

    def values_from(self, plane: int, unit: int) -> int:
        """Return how many units of numbers the values of this plane come after the keys of plane 0."""
        return (plane * self.memory.plane_size + self.memory.key_tile) // unit


class TorchAttention:
    """Holds the views of the KV cache and the buffers that blocks are gathered into; makes a TorchBatch for each step.

    kv_cache: the tensor that was given, of the shape that KVCacheLayout.shape says
    groups:   the views of each group, in the geometry's order
    planes:   where each layer's KV is, by the layer's index in the model

    Implements AttentionBackend.
    """

    def __init__(
        self, kv_cache: Tensor, geometry: KVGeometry, block_size: int, *, key_order: KeyOrder = KeyOrder.PLAIN
    ) -> None:
        """kv_cache must be contiguous; geometry is the model's."""
        self.kv_cache = kv_cache
        self.groups = [GroupTensors(kv_cache, memory, key_order) for memory in group_memories(geometry, block_size)]
        self.planes = geometry.layer_planes
        self.reaches = geometry.reaches_of_groups
        self.block_size = block_size
        self.key_order = key_order
        self.is_causal = geometry.is_causal
        self._buffers = [kv_cache.new_empty(0) for _ in range(5)]

    def prepare(self, shape: BatchShape) -> TorchBatch:
        """Plan one step. The result may be used until the next call, which reuses its buffers."""
        return TorchBatch(self, shape)

    def gather(
        self, tiles: Tensor, layer: AttentionLayer, num_sequences: int, *, beside: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Copy keys and values of some blocks into the reused buffers.

        tiles:  [num_sequences * num_kv_heads * num_blocks], int64, tiles of plane 0's keys
        beside: use a second pair of buffers, so that a call without beside does not overwrite these keys and values
        Returns keys and values, [num_sequences, num_kv_heads, num_keys, key_size or value_size].
        """
        place = self.planes[layer.index]
        group, first = self.groups[place.group], 2 * beside
        memory = group.memory
        key_tiles = group.key_tiles[group.keys_from(place.plane, memory.tile_unit) :]
        if self.key_order is KeyOrder.PLAIN:
            keys = self._gather(key_tiles, tiles, first)
        else:
            stored = self._gather(key_tiles, tiles, _TRANSPOSED_BUFFER)
            keys = self._buffer(first, len(tiles), memory.key_tile)
            turned = stored.view(len(tiles), memory.key_size, memory.block_size).transpose(1, 2)
            keys.view(len(tiles), memory.block_size, memory.key_size).copy_(turned)
        keys = keys.view(num_sequences, memory.num_kv_heads, -1, memory.key_size)
        if not memory.value_size:
            return keys, keys[..., : layer.value_size]
        value_tiles = group.value_tiles[group.values_from(place.plane, memory.tile_unit) :]
        values = self._gather(value_tiles, tiles, first + 1)
        return keys, values.view(num_sequences, memory.num_kv_heads, -1, memory.value_size)

    def _gather(self, source: Tensor, tiles: Tensor, which: int) -> Tensor:
        gathered = self._buffer(which, len(tiles), source.shape[1])
        torch.index_select(source, 0, tiles, out=gathered)
        return gathered

    def _buffer(self, which: int, num_tiles: int, tile_size: int) -> Tensor:
        """Return a reused buffer, [num_tiles, tile_size]."""
        size = num_tiles * tile_size
        if self._buffers[which].numel() < size:
            # Allocate half as much again as needed: a decode batch asks for a little more at almost every step.
            self._buffers[which] = self.kv_cache.new_empty(size * 3 // 2)
        return self._buffers[which][:size].view(num_tiles, -1)


class TorchBatch:
    """One step's batch: writes each layer's keys and values, then attends.

    Implements BatchAttention and LatentAttention.
    """

    def __init__(self, backend: TorchAttention, shape: BatchShape) -> None:
        self._backend = backend
        slots = token_slots(shape, backend.block_size)
        self._writes = [plan_writes(slots, group.shape) for group in backend.groups]
        self._plans = {
            (index, reach): plan_reach(shape, group.shape, reach, is_causal=backend.is_causal)
            for index, group in enumerate(backend.groups)
            for reach in backend.reaches[index]
        }
        self._repeated_masks: dict[int, Tensor] = {}
        """The masks of buckets with several tokens, repeated for the query heads of a KV head, by the bucket's id."""
        begun = begun_blocks(shape, backend.block_size)
        if len(begun):
            [blocks] = upload([begun], backend.kv_cache.device)
            backend.kv_cache.index_fill_(0, blocks, 0)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        place = self._backend.planes[layer.index]
        if place.is_stored:
            self._write(place, key, value)
        plan = self._plans[place.group, layer.reach]
        num_heads, num_tokens, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, value.shape[-1])
        for bucket in plan.decodes:
            tokens = bucket.tokens.view(-1)
            output.index_copy_(0, tokens, self._decode(layer, bucket, query.index_select(1, tokens), sinks))
        for segment in plan.prefills:
            attended = self._prefill(layer, segment, (query, key, value), sinks)
            output[segment.start : segment.stop] = attended.transpose(0, 1)
        return output

    def attend_latent(self, layer: AttentionLayer, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        """See LatentAttention. Sequences that compute few tokens attend absorbed, the others in the cheaper way."""
        place = self._backend.planes[layer.index]
        self._write(place, latent, latent[..., : heads.rank])
        plan = self._plans[place.group, layer.reach]
        output = query.new_empty(query.shape[1], heads.num_heads, heads.value_size)
        for bucket in plan.decodes:
            tokens = bucket.tokens.view(-1)
            attended = self._decode(layer, bucket, heads.absorb(query.index_select(1, tokens)), None)
            output.index_copy_(0, tokens, heads.project(attended))
        for segment in plan.prefills:
            own = slice(segment.start, segment.stop)
            latents = latent[0, own]
            if segment.tiles is not None:
                latents = self._backend.gather(segment.tiles, layer, 1)[0][0, 0]
            output[own] = attend_sequence(query[:, own], latents, segment.mask, heads, layer.scaling)
        return output

    def _write(self, place: LayerPlane, key: Tensor, value: Tensor) -> None:
        group, rows = self._backend.groups[place.group], self._writes[place.group]
        memory, dtype = group.memory, group.key_rows.dtype
        keys = key.reshape(-1, memory.key_size).to(dtype)
        group.key_rows[group.keys_from(place.plane, group.shape.key_unit) :].index_copy_(0, rows.keys, keys)
        if rows.values is not None:
            values = value.reshape(-1, memory.value_size).to(dtype)
            group.value_rows[group.values_from(place.plane, memory.value_unit) :].index_copy_(0, rows.values, values)

    def _decode(self, layer: AttentionLayer, bucket: DecodeBucket, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention of a bucket's tokens, [n * num_queries, num_heads, value_size].

        query: of these tokens, [num_heads, n * num_queries, key_size]
        """
        num_sequences, num_queries = bucket.tokens.shape
        keys, values = self._backend.gather(bucket.tiles, layer, num_sequences)
        num_heads, num_kv_heads = query.shape[0], keys.shape[1]
        group = num_heads // num_kv_heads
        queries = query.view(num_heads, num_sequences, num_queries, -1)
        folded = queries.transpose(0, 1).reshape(num_sequences, num_kv_heads, group * num_queries, -1)
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group, 1).expand(-1, -1, num_queries).reshape(num_kv_heads, -1, 1)
        if bucket.prefix_tiles is None:
            attended = _attend(layer, folded, (keys, values), self._mask(bucket, group), sinks)
        else:
            prefix = self._backend.gather(bucket.prefix_tiles, layer, 1, beside=True)
            attended = attend_with_shared_prefix(layer, folded, prefix, (keys, values), bucket.mask, sinks)
        by_head = attended.reshape(num_sequences, num_heads, num_queries, -1)
        return by_head.transpose(1, 2).reshape(num_sequences * num_queries, num_heads, -1)

    def _mask(self, bucket: DecodeBucket, group: int) -> Tensor:
        """Return the mask for query rows that are folded head by head, [n, 1, 1 or group * num_queries, num_keys]."""
        if bucket.tokens.shape[1] == 1:
            return bucket.mask
        if id(bucket) not in self._repeated_masks:
            self._repeated_masks[id(bucket)] = bucket.mask.repeat(1, 1, group, 1)
        return self._repeated_masks[id(bucket)]

    def _prefill(
        self,
        layer: AttentionLayer,
        segment: PrefillSegment,
        states: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention of one sequence's tokens, [num_heads, stop - start, value_size].

        states: the step's queries, keys and values
        """
        query, key, value = states
        tokens = slice(segment.start, segment.stop)
        queries = query[None, :, tokens]
        if segment.tiles is None:
            keys, values = key[None, :, tokens], value[None, :, tokens]
        else:
            assert layer.is_causal, "without causal attention, all of a prompt is computed in one step"
            keys, values = self._backend.gather(segment.tiles, layer, 1)
        if sinks is not None:
            sinks = sinks[:, None, None]
        return _attend(layer, queries, (keys, values), segment.mask, sinks)[0]


def _attend(
    layer: AttentionLayer, query: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attend with queries, [n, num_heads, q, key_size], to keys and values, [n, num_kv_heads, k, key or value_size].

    mask:  additive, broadcast to [n, num_heads, q, k]. None: the layer is causal, or has no mask at all, and q == k
    sinks: [num_heads, q or 1, 1], the score of each row's sink; None: the layer has none
    Returns [n, num_heads, q, value_size].
    """
    key, value = cached
    if layer.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and layer.is_causal,
            scale=layer.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    if mask is None and layer.is_causal:
        mask = query.new_full((query.shape[2], key.shape[2]), float("-inf")).triu_(1)
    num_rows = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = [
        _attend_by_scores(
            layer,
            query[:, :, rows],
            cached,
            mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :],
            sinks if sinks is None or sinks.shape[1] == 1 else sinks[:, rows],
        )
        for rows in (slice(first, first + num_rows) for first in range(0, query.shape[2], num_rows))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_by_scores(
    layer: AttentionLayer, query: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attend as _attend does, for what torch's fused attention cannot compute: soft-capped scores (Gemma 2), sinks."""
    key, value = cached
    num_sequences, num_kv_heads, _, head_dim = key.shape
    grouped = query.reshape(num_sequences, num_kv_heads, -1, query.shape[2], head_dim)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + (mask[:, :, None] if mask.ndim == 4 else mask)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, sinks.shape[1], 1)
    weights = softmax_with_sinks(scores, sinks).to(query.dtype)
    return torch.matmul(weights, value[:, :, None]).reshape(*query.shape[:-1], -1)
