"""Plans which slots a step writes and which blocks it reads: once per step, the same for every layer.

The cache is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]. Two flat views of it make every access one
index_copy or index_select, with the layer as a constant offset:
- rows  [num_blocks * num_kv_heads * num_layers * 2 * block_size, head_dim]: one token's key or value of one head;
- tiles [num_blocks * num_kv_heads * num_layers * 2, block_size * head_dim]: one block's keys or values of one head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.cascade import count_shared_blocks

# Decoding sequences share one padded gather while the longest of them has at most this many times as many blocks as the
# shortest, or at most _ALWAYS_TOGETHER_BLOCKS more.
_MAX_BUCKET_RATIO = 1.5
_ALWAYS_TOGETHER_BLOCKS = 8
_MAX_SHORT_TOKENS = 16
"""Sequences with at most this many tokens are computed together, those with more one by one."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache's dimensions that a plan needs.

    dtype:  the dtype of the masks, the same as the cache's
    device: where masks and index tensors are created
    """

    num_kv_heads: int
    num_layers: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences of similar length that compute few tokens each: one, or those of drafts or of a short chunk.

    Sequences with fewer tokens than the others repeat their last one, which gives the same result again.

    tokens: [n, num_queries], int64, the indices of each sequence's tokens in the flattened batch
    tiles:  [n * num_kv_heads * num_blocks], int64, tiles of layer 0's keys
    mask:   [n, 1, num_queries, num_blocks * block_size], additive, the cache's dtype
    prefix_tiles: [num_kv_heads * num_prefix_blocks], int64, layer 0's key tiles of the blocks that all sequences begin
        with; tiles then holds the blocks after them. None if no blocks are shared
    """

    tokens: Tensor
    tiles: Tensor
    mask: Tensor
    prefix_tiles: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence that computes several tokens, [start, stop) of the flattened batch.

    tiles: [num_kv_heads * num_blocks], int64, tiles of layer 0's keys, or None if the sequence attends to this step's
        tokens only
    mask:  [num_tokens, num_keys], additive, the cache's dtype, or None for plain causal attention
    """

    start: int
    stop: int
    tiles: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The blocks and masks that all layers with the same sliding window (or with full attention) use in this step."""

    decodes: list[DecodeBucket]
    prefills: list[PrefillSegment]


def plan_writes(shape: BatchShape, cache: CacheShape) -> tuple[Tensor, Tensor]:
    """Return the rows of layer 0's keys that this step writes, [num_kv_heads * num_tokens], and begun_blocks()."""
    blocks, offsets = token_slots(shape, cache.block_size)
    heads = np.arange(cache.num_kv_heads)[:, None]
    rows = (blocks * cache.num_kv_heads + heads) * (cache.num_layers * 2 * cache.block_size) + offsets
    return _to_tensor(rows.reshape(-1), cache), _to_tensor(begun_blocks(shape, cache.block_size), cache)


def token_slots(shape: BatchShape, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the block of each token of the step, and the token's slot in it; both [num_tokens] int64."""
    requests = np.repeat(np.arange(len(shape.num_computed)), shape.query_lens)
    positions = np.arange(len(requests)) - (shape.query_starts[:-1] - shape.num_computed)[requests]
    return shape.block_tables[requests, positions // block_size], positions % block_size


def begun_blocks(shape: BatchShape, block_size: int) -> np.ndarray:
    """Return the blocks that must be zeroed first: a sequence begins them in this step and does not fill them.

    Invariant: a slot that nobody has written holds finite numbers. A masked slot has weight 0, but 0 times a NaN that
    another request left there would still be NaN.
    Returns [n] int64.
    """
    ends = shape.seq_lens
    last_block_starts = (ends - 1) // block_size * block_size
    is_begun = (last_block_starts >= shape.num_computed) & (ends % block_size != 0)
    begun: np.ndarray = shape.block_tables[np.flatnonzero(is_begun), last_block_starts[is_begun] // block_size]
    return begun


def plan_window(shape: BatchShape, cache: CacheShape, sliding_window: int | None, *, is_causal: bool) -> WindowPlan:
    """Split the batch into decode buckets and prefill segments.

    sliding_window: in tokens; blocks that lie wholly before the window are not read. None: full attention
    is_causal: if not, every sequence with more than one token is a segment
    """
    first_queries = shape.num_computed
    first_keys = np.zeros_like(first_queries)
    if sliding_window is not None:
        first_keys = np.maximum(first_queries - sliding_window + 1, 0)
    first_blocks = first_keys // cache.block_size
    widths = _bucket_widths(shape.query_lens, is_causal=is_causal)
    decoding = np.flatnonzero(widths == 1)
    prefix_tiles = None
    if sliding_window is None and shape.num_common_blocks:
        prefix_tiles = _plan_prefix(shape, decoding, first_blocks, cache)
    num_blocks = -(-shape.seq_lens // cache.block_size) - first_blocks
    decodes = []
    for width in np.unique(widths[widths > 0]).tolist():
        for bucket in _buckets(np.flatnonzero(widths == width), num_blocks):
            plan = _plan_decodes((bucket, width), shape, first_blocks, num_blocks, (cache, sliding_window))
            decodes.append(plan if width > 1 else replace(plan, prefix_tiles=prefix_tiles))
    prefills = [
        _plan_prefill(int(request), shape, int(first_blocks[request]), (cache, sliding_window))
        for request in np.flatnonzero(widths == 0)
    ]
    return WindowPlan(decodes, prefills)


def _bucket_widths(query_lens: np.ndarray, *, is_causal: bool) -> np.ndarray:
    """Return the number of tokens to which each sequence is filled up in its bucket; 0 for those that are segments."""
    powers = 2 ** np.ceil(np.log2(query_lens)).astype(np.int64)
    is_short = (query_lens == 1) | (is_causal & (query_lens <= _MAX_SHORT_TOKENS))
    return np.where(is_short, powers, 0)


def _plan_prefix(shape: BatchShape, decoding: np.ndarray, first_blocks: np.ndarray, cache: CacheShape) -> Tensor | None:
    """Return the tiles of the blocks that are read once for all decoding requests, or None if there are none.

    Sets first_blocks of the decoding requests to the first block after the shared ones.
    """
    num_shared = count_shared_blocks(shape, len(decoding), cache.block_size, cache.device)
    if not num_shared:
        return None
    blocks = shape.block_tables[decoding, :num_shared]
    assert (blocks == blocks[0]).all(), "the requests do not begin with the same blocks"
    assert (shape.num_computed[decoding] >= num_shared * cache.block_size).all(), "a shared block is not filled"
    first_blocks[decoding] = num_shared
    return _tiles(blocks[:1], cache)


def _buckets(requests: np.ndarray, num_blocks: np.ndarray) -> list[np.ndarray]:
    """Group requests of similar length: few groups mean few calls, similar lengths mean little padding."""
    if len(requests) == 0:
        return []
    ordered = requests[np.argsort(num_blocks[requests], kind="stable")]
    buckets: list[list[int]] = [[]]
    shortest = int(num_blocks[ordered[0]])
    for request in ordered.tolist():
        length = int(num_blocks[request])
        if buckets[-1] and length > max(shortest * _MAX_BUCKET_RATIO, shortest + _ALWAYS_TOGETHER_BLOCKS):
            buckets.append([])
            shortest = length
        buckets[-1].append(request)
    return [np.array(bucket) for bucket in buckets]


def _plan_decodes(
    bucket: tuple[np.ndarray, int],
    shape: BatchShape,
    first_blocks: np.ndarray,
    num_blocks: np.ndarray,
    kind: tuple[CacheShape, int | None],
) -> DecodeBucket:
    """Plan a bucket: its requests, and the number of tokens that each has in it."""
    (requests, width), (cache, sliding_window) = bucket, kind
    columns = np.arange(int(num_blocks[requests].max()))
    # Padding repeats a sequence's own last block, never another request's; the mask hides the repetition.
    columns = np.minimum(columns, num_blocks[requests, None] - 1) + first_blocks[requests, None]
    blocks = shape.block_tables[requests[:, None], columns]
    num_keys = blocks.shape[1] * cache.block_size
    positions = first_blocks[requests, None] * cache.block_size + np.arange(num_keys)
    steps = np.minimum(np.arange(width), shape.query_lens[requests, None] - 1)
    queries = (shape.num_computed[requests, None] + steps)[:, :, None]
    mask = _to_mask(_is_visible(queries, positions[:, None, :], sliding_window), cache)
    tokens = _to_tensor(shape.query_starts[requests, None] + steps, cache)
    return DecodeBucket(tokens, _tiles(blocks, cache), mask[:, None])


def _plan_prefill(
    request: int, shape: BatchShape, first_block: int, kind: tuple[CacheShape, int | None]
) -> PrefillSegment:
    cache, sliding_window = kind
    start, stop = (int(edge) for edge in shape.query_starts[request : request + 2])
    num_computed = int(shape.num_computed[request])
    seq_len = num_computed + stop - start
    queries = np.arange(num_computed, seq_len)[:, None]
    if num_computed == 0:
        fits_window = sliding_window is None or seq_len <= sliding_window
        mask = None if fits_window else _to_mask(_is_visible(queries, queries.T, sliding_window), cache)
        return PrefillSegment(start, stop, None, mask)
    blocks = shape.block_tables[request, first_block : -(-seq_len // cache.block_size)]
    positions = first_block * cache.block_size + np.arange(len(blocks) * cache.block_size)
    mask = _to_mask(_is_visible(queries, positions, sliding_window), cache)
    return PrefillSegment(start, stop, _tiles(blocks[None], cache), mask)


def _is_visible(queries: np.ndarray, keys: np.ndarray, sliding_window: int | None) -> np.ndarray:
    visible: np.ndarray = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible


def _tiles(blocks: np.ndarray, cache: CacheShape) -> Tensor:
    """Map block ids, [n, num_blocks], to tiles of layer 0's keys, [n * num_kv_heads * num_blocks], int64."""
    heads = np.arange(cache.num_kv_heads)[:, None]
    tiles = (blocks[:, None, :] * cache.num_kv_heads + heads) * (cache.num_layers * 2)
    return _to_tensor(tiles.reshape(-1), cache)


def _to_mask(is_visible: np.ndarray, cache: CacheShape) -> Tensor:
    visible = torch.from_numpy(is_visible).to(cache.device)
    mask = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device)
    return mask.masked_fill_(~visible, float("-inf"))


def _to_tensor(indices: np.ndarray, cache: CacheShape) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64)).to(cache.device)
