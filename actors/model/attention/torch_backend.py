"""Attention with torch's own operations, on any device.

Keys and values are gathered from their blocks into a buffer that is reused from layer to layer and step to step (fresh
memory costs page faults: three times slower, measured), then torch's scaled_dot_product_attention does the rest. A
decoding sequence's query heads of one KV head become its query rows, so keys are never repeated per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.batch_plan import CacheShape, DecodeBucket, PrefillSegment, plan_window, plan_writes
from actors.model.attention.cascade import attend_with_shared_prefix


class TorchAttention:
    """Holds the views of the KV cache and the gather buffers; makes a TorchBatch for each step."""

    def __init__(self, kv_cache: Tensor, sliding_windows: frozenset[int | None]) -> None:
        """kv_cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], contiguous."""
        _, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
        self.kv_cache = kv_cache
        self.rows = kv_cache.view(-1, head_dim)
        self.tiles = kv_cache.view(-1, block_size * head_dim)
        self.shape = CacheShape(num_kv_heads, num_layers, block_size, kv_cache.dtype, kv_cache.device)
        self._sliding_windows = sliding_windows
        self._buffers = [kv_cache.new_empty(0) for _ in range(4)]

    def prepare(self, shape: BatchShape) -> TorchBatch:
        """Plan one step. The plan is valid until the next call."""
        return TorchBatch(self, shape, self._sliding_windows)

    def gather(self, tiles: Tensor, layer: int, num_sequences: int, *, beside: bool = False) -> tuple[Tensor, Tensor]:
        """Copy keys and values into the reused buffers: two of [num_sequences, num_kv_heads, num_keys, head_dim].

        beside: into others than the next call without it uses
        """
        first = 2 * beside
        return (
            self._gather(tiles, 2 * layer, num_sequences, first),
            self._gather(tiles, 2 * layer + 1, num_sequences, first + 1),
        )

    def _gather(self, tiles: Tensor, offset: int, num_sequences: int, which: int) -> Tensor:
        tile_size = self.tiles.shape[1]
        if self._buffers[which].numel() < tiles.shape[0] * tile_size:
            # Grow by a half more than needed: a decode batch asks for a little more at almost every step.
            self._buffers[which] = self.kv_cache.new_empty(tiles.shape[0] * tile_size * 3 // 2)
        gathered = self._buffers[which][: tiles.shape[0] * tile_size].view(-1, tile_size)
        torch.index_select(self.tiles[offset:], 0, tiles, out=gathered)
        return gathered.view(num_sequences, self.shape.num_kv_heads, -1, self.rows.shape[1])


class TorchBatch:
    """One step's batch: writes each layer's keys and values, then attends. Implements BatchAttention."""

    def __init__(self, backend: TorchAttention, shape: BatchShape, sliding_windows: frozenset[int | None]) -> None:
        self._backend = backend
        self._write_rows, begun_blocks = plan_writes(shape, backend.shape)
        self._plans = {window: plan_window(shape, backend.shape, window) for window in sliding_windows}
        if begun_blocks.shape[0]:
            backend.kv_cache.index_fill_(0, begun_blocks, 0)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See BatchAttention."""
        self._write(layer.index, key, value)
        plan = self._plans[layer.sliding_window]
        num_heads, num_tokens, head_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, head_dim)
        for bucket in plan.decodes:
            output.index_copy_(0, bucket.tokens, self._decode(layer, bucket, query))
        for segment in plan.prefills:
            attended = self._prefill(layer, segment, query, key, value)
            output[segment.start : segment.stop] = attended.transpose(0, 1)
        return output

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        block_size, head_dim = self._backend.shape.block_size, key.shape[-1]
        for offset, states in ((2 * layer, key), (2 * layer + 1, value)):
            self._backend.rows[offset * block_size :].index_copy_(
                0, self._write_rows, states.reshape(-1, head_dim).to(self._backend.rows.dtype)
            )

    def _decode(self, layer: AttentionLayer, bucket: DecodeBucket, query: Tensor) -> Tensor:
        """[n, num_heads, head_dim] of a bucket's tokens."""
        num_sequences, num_kv_heads = bucket.tokens.shape[0], self._backend.shape.num_kv_heads
        keys, values = self._backend.gather(bucket.tiles, layer.index, num_sequences)
        queries = query.index_select(1, bucket.tokens).transpose(0, 1)
        folded = queries.reshape(num_sequences, num_kv_heads, -1, query.shape[-1])
        if bucket.prefix_tiles is None:
            attended = _attend(layer, folded, keys, values, bucket.mask)
        else:
            prefix = self._backend.gather(bucket.prefix_tiles, layer.index, 1, beside=True)
            attended = attend_with_shared_prefix(layer, folded, prefix, (keys, values), bucket.mask)
        return attended.reshape(num_sequences, -1, query.shape[-1])

    def _prefill(
        self, layer: AttentionLayer, segment: PrefillSegment, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """[num_heads, stop - start, head_dim] of one sequence's tokens."""
        tokens = slice(segment.start, segment.stop)
        queries = query[None, :, tokens]
        if segment.tiles is None:
            keys, values = key[None, :, tokens], value[None, :, tokens]
        else:
            assert layer.is_causal, "a prompt whose tokens see all of it is in one step"
            keys, values = self._backend.gather(segment.tiles, layer.index, 1)
        return _attend(layer, queries, keys, values, segment.mask)[0]


def _attend(layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[n, num_heads, q, head_dim] against [n, num_kv_heads, k, head_dim]; no mask: causal, or all of it, and q == k."""
    if layer.softcap is not None:
        return _attend_with_softcap(layer, query, key, value, mask)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and layer.is_causal,
        scale=layer.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_with_softcap(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """The same with scores squeezed by tanh before the mask, which torch's fused attention cannot do (Gemma 2)."""
    assert layer.softcap is not None
    num_sequences, num_kv_heads, _, head_dim = key.shape
    grouped = query.reshape(num_sequences, num_kv_heads, -1, query.shape[2], head_dim)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * layer.scaling
    scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + (mask[:, :, None] if mask.ndim == 4 else mask)
    elif layer.is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(causal, float("-inf"))
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value[:, :, None]).reshape(query.shape)
