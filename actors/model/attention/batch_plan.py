"""Plans which slots a step writes and which blocks it reads: once per step, the same for every layer.

Flat views of the cache make every access one index_copy or index_select, with the plane as a constant offset. Each
group of layers has its own (group_memory.py says where its tiles and rows begin):
- rows  [n, key_size] and [n, value_size]: one token's key or value of one head;
- tiles [n, block_size * key_size] and [n, block_size * value_size]: one block's keys or values of one head.
A model whose layers are alike has one group. Its rows and tiles are the cache itself, reshaped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.batch_attention import BatchShape, Reach
from actors.model.attention.cascade import count_shared_blocks
from actors.model.cache.group_memory import GroupMemory
from actors.model.uploads import upload
from kv_transfer.layout import KeyOrder

# Decoding sequences share one padded gather while the longest of them has at most this many times as many blocks as the
# shortest, or at most _ALWAYS_TOGETHER_BLOCKS more.
_MAX_BUCKET_RATIO = 1.5
_ALWAYS_TOGETHER_BLOCKS = 8
_MAX_SHORT_TOKENS = 16
"""Sequences with at most this many tokens are computed together, those with more one by one."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One group's part of the KV cache, and how plans for it are made.

    dtype:  the dtype of the masks, the same as the cache's
    device: where masks and index tensors are created
    key_order: of the keys' tiles
    """

    memory: GroupMemory
    dtype: torch.dtype
    device: torch.device
    key_order: KeyOrder = KeyOrder.PLAIN

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.memory.block_size

    @property
    def key_unit(self) -> int:
        """How many numbers of the cache the rows of keys are apart."""
        return self.memory.key_unit if self.key_order is KeyOrder.PLAIN else 1


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences of similar length that compute few tokens each: one, or those of drafts or of a short chunk.

    Sequences with fewer tokens than the others repeat their last one, which gives the same result again.

    tokens: [n, num_queries], int64, the indices of each sequence's tokens in the flattened batch
    tiles:  [n * num_kv_heads * num_blocks], int64, tiles of plane 0's keys
    mask:   [n, 1, num_queries, num_blocks * block_size], additive, the cache's dtype
    prefix_tiles: [num_kv_heads * num_prefix_blocks], int64, plane 0's key tiles of the blocks that all sequences begin
        with; tiles then holds the blocks after them. None if no blocks are shared
    """

    tokens: Tensor
    tiles: Tensor
    mask: Tensor
    prefix_tiles: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence that computes several tokens, [start, stop) of the flattened batch.

    tiles: [num_kv_heads * num_blocks], int64, tiles of plane 0's keys, or None if the sequence attends to this step's
        tokens only
    mask:  [num_tokens, num_keys], additive, the cache's dtype, or None for plain causal attention
    """

    start: int
    stop: int
    tiles: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ReachPlan:
    """The blocks and masks that all layers of a group with the same reach use in this step."""

    decodes: list[DecodeBucket]
    prefills: list[PrefillSegment]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The rows of plane 0 that a step writes, each [num_kv_heads * num_tokens] int64.

    values: relative to plane 0's keys; None where the group stores no values
    """

    keys: Tensor
    values: Tensor | None


def plan_writes(slots: tuple[np.ndarray, np.ndarray], cache: CacheShape) -> WritePlan:
    """Return the rows that a step writes. slots: token_slots() of the step"""
    memory = cache.memory
    key_distance = memory.key_size if cache.key_order is KeyOrder.PLAIN else 1
    keys = _to_tensor(_rows(slots, memory, key_distance, cache.key_unit), cache)
    if not memory.value_size:
        return WritePlan(keys, None)
    if memory.value_size == key_distance and memory.value_unit == cache.key_unit:
        return WritePlan(keys, keys)
    return WritePlan(keys, _to_tensor(_rows(slots, memory, memory.value_size, memory.value_unit), cache))


def _rows(slots: tuple[np.ndarray, np.ndarray], memory: GroupMemory, distance: int, unit: int) -> np.ndarray:
    """Return where the slots of plane 0's keys are, [num_kv_heads * num_tokens] int64, in units of numbers.

    distance: from one token of a tile to the next, in numbers
    """
    blocks, offsets = slots
    heads = np.arange(memory.num_kv_heads)[:, None]
    in_block = (memory.offset + heads * memory.head_distance) // unit
    rows: np.ndarray = blocks * (memory.block_size_numbers // unit) + in_block + offsets * (distance // unit)
    return rows.reshape(-1)


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


def plan_reach(shape: BatchShape, cache: CacheShape, reach: Reach, *, is_causal: bool) -> ReachPlan:
    """Split the batch into decode buckets and prefill segments.

    reach: blocks that lie wholly before the window or the chunk of a request's first token are not read
    is_causal: if not, every sequence with more than one token is a segment
    """
    first_queries = shape.num_computed
    first_keys = np.zeros_like(first_queries)
    if reach.sliding_window is not None:
        first_keys = np.maximum(first_queries - reach.sliding_window + 1, 0)
    if reach.chunk_size is not None:
        first_keys = np.maximum(first_keys, first_queries // reach.chunk_size * reach.chunk_size)
    first_blocks = first_keys // cache.block_size
    widths = _bucket_widths(shape.query_lens, is_causal=is_causal)
    decoding = np.flatnonzero(widths == 1)
    prefix_tiles = None
    if reach == Reach() and shape.num_common_blocks:
        prefix_tiles = _plan_prefix(shape, decoding, first_blocks, cache)
    num_blocks = -(-shape.seq_lens // cache.block_size) - first_blocks
    decodes = []
    for width in np.unique(widths[widths > 0]).tolist():
        for bucket in _buckets(np.flatnonzero(widths == width), num_blocks):
            plan = _plan_decodes((bucket, width), shape, first_blocks, num_blocks, (cache, reach))
            decodes.append(plan if width > 1 else replace(plan, prefix_tiles=prefix_tiles))
    prefills = [
        _plan_prefill(int(request), shape, int(first_blocks[request]), (cache, reach))
        for request in np.flatnonzero(widths == 0)
    ]
    return ReachPlan(decodes, prefills)


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
    kind: tuple[CacheShape, Reach],
) -> DecodeBucket:
    """Plan a bucket: its requests, and the number of tokens that each has in it."""
    (requests, width), (cache, reach) = bucket, kind
    columns = np.arange(int(num_blocks[requests].max()))
    # Padding repeats a sequence's own last block, never another request's; the mask hides the repetition.
    columns = np.minimum(columns, num_blocks[requests, None] - 1) + first_blocks[requests, None]
    blocks = shape.block_tables[requests[:, None], columns]
    num_keys = blocks.shape[1] * cache.block_size
    positions = first_blocks[requests, None] * cache.block_size + np.arange(num_keys)
    steps = np.minimum(np.arange(width), shape.query_lens[requests, None] - 1)
    queries = (shape.num_computed[requests, None] + steps)[:, :, None]
    mask = _to_mask(_is_visible(queries, positions[:, None, :], reach), cache)
    tokens = _to_tensor(shape.query_starts[requests, None] + steps, cache)
    return DecodeBucket(tokens, _tiles(blocks, cache), mask[:, None])


def _plan_prefill(request: int, shape: BatchShape, first_block: int, kind: tuple[CacheShape, Reach]) -> PrefillSegment:
    cache, reach = kind
    start, stop = (int(edge) for edge in shape.query_starts[request : request + 2])
    num_computed = int(shape.num_computed[request])
    seq_len = num_computed + stop - start
    queries = np.arange(num_computed, seq_len)[:, None]
    if num_computed == 0:
        reaches_all = seq_len <= min(reach.sliding_window or seq_len, reach.chunk_size or seq_len)
        mask = None if reaches_all else _to_mask(_is_visible(queries, queries.T, reach), cache)
        return PrefillSegment(start, stop, None, mask)
    blocks = shape.block_tables[request, first_block : -(-seq_len // cache.block_size)]
    positions = first_block * cache.block_size + np.arange(len(blocks) * cache.block_size)
    mask = _to_mask(_is_visible(queries, positions, reach), cache)
    return PrefillSegment(start, stop, _tiles(blocks[None], cache), mask)


def _is_visible(queries: np.ndarray, keys: np.ndarray, reach: Reach) -> np.ndarray:
    visible: np.ndarray = keys <= queries
    if reach.sliding_window is not None:
        visible &= keys > queries - reach.sliding_window
    if reach.chunk_size is not None:
        visible &= keys // reach.chunk_size == queries // reach.chunk_size
    return visible


def _tiles(blocks: np.ndarray, cache: CacheShape) -> Tensor:
    """Map block ids, [n, num_blocks], to tiles of plane 0's keys, [n * num_kv_heads * num_blocks], int64."""
    memory, unit = cache.memory, cache.memory.tile_unit
    heads = np.arange(memory.num_kv_heads)[:, None]
    in_block = (memory.offset + heads * memory.head_distance) // unit
    tiles = blocks[:, None, :] * (memory.block_size_numbers // unit) + in_block
    return _to_tensor(tiles.reshape(-1), cache)


def _to_mask(is_visible: np.ndarray, cache: CacheShape) -> Tensor:
    [visible] = upload([is_visible], cache.device)
    mask = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device)
    return mask.masked_fill_(~visible, float("-inf"))


def _to_tensor(indices: np.ndarray, cache: CacheShape) -> Tensor:
    [uploaded] = upload([np.ascontiguousarray(indices, dtype=np.int64)], cache.device)
    return uploaded
