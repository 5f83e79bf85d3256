"""Attention with torch's own operations, on any device.

Keys and values are gathered from their blocks into a buffer, then torch's scaled_dot_product_attention computes the
result. The buffer is reused from layer to layer and step to step, since fresh memory costs page faults, and was three
times slower when measured. The query heads that share a KV head become rows of one query matrix, so keys are never
repeated for each head.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.batch_plan import CacheShape, DecodeBucket, PrefillSegment, plan_window, plan_writes
from actors.model.attention.cascade import attend_with_shared_prefix
from actors.model.attention.sinks import softmax_with_sinks
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
        geometry = needs.geometry
        return TorchAttention(
            kv_cache, geometry.sliding_windows, key_order=needs.key_order, is_causal=geometry.is_causal
        )


class TorchAttention:
    """Holds the views of the KV cache and the buffers that blocks are gathered into; makes a TorchBatch for each step.

    kv_cache: the tensor that was given, [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]
    rows, tiles: flat views of kv_cache, as batch_plan.py describes them

    Implements AttentionBackend.
    """

    def __init__(
        self,
        kv_cache: Tensor,
        sliding_windows: frozenset[int | None],
        *,
        key_order: KeyOrder = KeyOrder.PLAIN,
        is_causal: bool,
    ) -> None:
        """kv_cache must be contiguous; sliding_windows and is_causal are those of the model's layers."""
        _, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
        self.kv_cache = kv_cache
        self.rows = kv_cache.view(-1, head_dim)
        self.tiles = kv_cache.view(-1, block_size * head_dim)
        self.shape = CacheShape(num_kv_heads, num_layers, block_size, kv_cache.dtype, kv_cache.device)
        self.key_order = key_order
        self.sliding_windows = sliding_windows
        self.is_causal = is_causal
        self._buffers = [kv_cache.new_empty(0) for _ in range(5)]

    def prepare(self, shape: BatchShape) -> TorchBatch:
        """Plan one step. The result may be used until the next call, which reuses its buffers."""
        return TorchBatch(self, shape)

    def gather(self, tiles: Tensor, layer: int, num_sequences: int, *, beside: bool = False) -> tuple[Tensor, Tensor]:
        """Copy keys and values of some blocks into the reused buffers.

        tiles:  [num_sequences * num_kv_heads * num_blocks], int64, tiles of layer 0's keys
        beside: use a second pair of buffers, so that a call without beside does not overwrite these keys and values
        Returns keys and values, each [num_sequences, num_kv_heads, num_keys, head_dim].
        """
        first = 2 * beside
        values = self._gather(tiles, 2 * layer + 1, first + 1)
        if self.key_order is KeyOrder.PLAIN:
            keys = self._gather(tiles, 2 * layer, first)
        else:
            stored, keys = self._gather(tiles, 2 * layer, _TRANSPOSED_BUFFER), self._buffer(first, len(tiles))
            shape = (len(tiles), self.shape.block_size, self.rows.shape[1])
            keys.view(shape).copy_(stored.view(shape[0], shape[2], shape[1]).transpose(1, 2))
        by_sequence = (num_sequences, self.shape.num_kv_heads, -1, self.rows.shape[1])
        return keys.view(by_sequence), values.view(by_sequence)

    def _gather(self, tiles: Tensor, offset: int, which: int) -> Tensor:
        gathered = self._buffer(which, len(tiles))
        torch.index_select(self.tiles[offset:], 0, tiles, out=gathered)
        return gathered

    def _buffer(self, which: int, num_tiles: int) -> Tensor:
        """Return a reused buffer, [num_tiles, block_size * head_dim]."""
        size = num_tiles * self.tiles.shape[1]
        if self._buffers[which].numel() < size:
            # Allocate half as much again as needed: a decode batch asks for a little more at almost every step.
            self._buffers[which] = self.kv_cache.new_empty(size * 3 // 2)
        return self._buffers[which][:size].view(num_tiles, -1)


class TorchBatch:
    """One step's batch: writes each layer's keys and values, then attends. Implements BatchAttention."""

    def __init__(self, backend: TorchAttention, shape: BatchShape) -> None:
        self._backend = backend
        self._write_rows, begun = plan_writes(shape, backend.shape)
        self._plans = {
            window: plan_window(shape, backend.shape, window, is_causal=backend.is_causal)
            for window in backend.sliding_windows
        }
        self._repeated_masks: dict[int, Tensor] = {}
        """The masks of buckets with several tokens, repeated for the query heads of a KV head, by the bucket's id."""
        if begun.shape[0]:
            backend.kv_cache.index_fill_(0, begun, 0)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        self._write(layer.index, key, value)
        plan = self._plans[layer.sliding_window]
        num_heads, num_tokens, head_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, head_dim)
        for bucket in plan.decodes:
            output.index_copy_(0, bucket.tokens.view(-1), self._decode(layer, bucket, query, sinks))
        for segment in plan.prefills:
            attended = self._prefill(layer, segment, (query, key, value), sinks)
            output[segment.start : segment.stop] = attended.transpose(0, 1)
        return output

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        backend, rows = self._backend, self._write_rows
        block_size, head_dim = backend.shape.block_size, key.shape[-1]
        keys, values = (states.reshape(-1, head_dim).to(backend.rows.dtype) for states in (key, value))
        if backend.key_order is KeyOrder.PLAIN:
            backend.rows[2 * layer * block_size :].index_copy_(0, rows, keys)
        else:
            stored = backend.tiles.view(-1, head_dim, block_size)
            stored[rows // block_size + 2 * layer, :, rows % block_size] = keys
        backend.rows[(2 * layer + 1) * block_size :].index_copy_(0, rows, values)

    def _decode(self, layer: AttentionLayer, bucket: DecodeBucket, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention of a bucket's tokens, [n * num_queries, num_heads, head_dim]."""
        (num_sequences, num_queries), num_kv_heads = bucket.tokens.shape, self._backend.shape.num_kv_heads
        num_heads, _, head_dim = query.shape
        group = num_heads // num_kv_heads
        keys, values = self._backend.gather(bucket.tiles, layer.index, num_sequences)
        queries = query.index_select(1, bucket.tokens.view(-1)).view(num_heads, num_sequences, num_queries, head_dim)
        folded = queries.transpose(0, 1).reshape(num_sequences, num_kv_heads, group * num_queries, head_dim)
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group, 1).expand(-1, -1, num_queries).reshape(num_kv_heads, -1, 1)
        if bucket.prefix_tiles is None:
            attended = _attend(layer, folded, (keys, values), self._mask(bucket, group), sinks)
        else:
            prefix = self._backend.gather(bucket.prefix_tiles, layer.index, 1, beside=True)
            attended = attend_with_shared_prefix(layer, folded, prefix, (keys, values), bucket.mask, sinks)
        by_head = attended.reshape(num_sequences, num_heads, num_queries, head_dim)
        return by_head.transpose(1, 2).reshape(-1, num_heads, head_dim)

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
        """Return the attention of one sequence's tokens, [num_heads, stop - start, head_dim].

        states: the step's queries, keys and values
        """
        query, key, value = states
        tokens = slice(segment.start, segment.stop)
        queries = query[None, :, tokens]
        if segment.tiles is None:
            keys, values = key[None, :, tokens], value[None, :, tokens]
        else:
            assert layer.is_causal, "without causal attention, all of a prompt is computed in one step"
            keys, values = self._backend.gather(segment.tiles, layer.index, 1)
        if sinks is not None:
            sinks = sinks[:, None, None]
        return _attend(layer, queries, (keys, values), segment.mask, sinks)[0]


def _attend(
    layer: AttentionLayer, query: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attend with queries, [n, num_heads, q, head_dim], to keys and values, [n, num_kv_heads, k, head_dim].

    mask:  additive, broadcast to [n, num_heads, q, k]. None: the layer is causal, or has no mask at all, and q == k
    sinks: [num_heads, q or 1, 1], the score of each row's sink; None: the layer has none
    Returns the queries' shape.
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
    return torch.matmul(weights, value[:, :, None]).reshape(query.shape)
