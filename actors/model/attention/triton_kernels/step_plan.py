"""Plans one step for the kernels: which tile of queries belongs to which request. Numbers in, arrays out; no device.

Requests with few tokens (decodes, drafts, ends of prompts) are *short*: each has one tile, and several programs share
its keys. The others are *long*: their tokens are cut into tiles, and one program goes through all keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.triton_kernels.tile_sizes import MostRows, short_rows


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of one kernel launch, all of the same number of rows.

    requests: [num_tiles] int32, the request of each tile
    tokens:   [num_tiles] int32, the first token of each tile in the flattened batch
    max_keys: the longest request's tokens in the cache, after the step
    max_tokens: the most tokens of a request; a sliding window of w tokens reads w + max_tokens - 1 keys at most
    """

    requests: np.ndarray
    tokens: np.ndarray
    rows: int
    max_keys: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    slots:        [num_tokens] int32, where each token's key and value go: block * block_size + offset
    begun_blocks: [n] int32, blocks that begin in this step and are not filled: they become zeros first
    query_starts: [num_requests + 1] int32
    seq_lens:     [num_requests] int32
    block_tables: [num_requests, max_blocks] int32
    short, long:  None if there are no such requests
    """

    slots: np.ndarray
    begun_blocks: np.ndarray
    query_starts: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    short: TilePlan | None
    long: TilePlan | None


def plan_step(shape: BatchShape, *, block_size: int, group: int, most_rows: MostRows) -> StepPlan:
    """Plan a step.

    group: query heads of a KV head, at most MAX_GROUP
    most_rows: of a tile; that of a long request is at least group
    """
    query_lens, seq_lens = shape.query_lens, shape.seq_lens
    requests = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(len(requests)) - (shape.query_starts[:-1] - shape.num_computed)[requests]
    slots = shape.block_tables[requests, positions // block_size] * block_size + positions % block_size
    last_starts = (seq_lens - 1) // block_size * block_size
    is_begun = (last_starts >= shape.num_computed) & (seq_lens % block_size != 0)
    begun = shape.block_tables[np.flatnonzero(is_begun), last_starts[is_begun] // block_size]
    short, long = plan_tiles(shape, group=group, most_rows=most_rows)
    return StepPlan(
        slots=slots.astype(np.int32),
        begun_blocks=begun.astype(np.int32),
        query_starts=shape.query_starts.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=shape.block_tables.astype(np.int32),
        short=short,
        long=long,
    )


def plan_tiles(shape: BatchShape, *, group: int, most_rows: MostRows) -> tuple[TilePlan | None, TilePlan | None]:
    """Return the tiles of the short requests and those of the long ones; None if there are no such requests."""
    is_short = shape.query_lens * group <= most_rows.short
    short_requests, long_requests = np.flatnonzero(is_short), np.flatnonzero(~is_short)
    return (
        _plan_short(shape, short_requests, group) if len(short_requests) else None,
        _plan_long(shape, long_requests, group, most_rows.long) if len(long_requests) else None,
    )


def _plan_short(shape: BatchShape, requests: np.ndarray, group: int) -> TilePlan:
    max_tokens = int(shape.query_lens[requests].max())
    return TilePlan(
        requests.astype(np.int32),
        shape.query_starts[requests].astype(np.int32),
        short_rows(group, max_tokens),
        int(shape.seq_lens[requests].max()),
        max_tokens,
    )


def _plan_long(shape: BatchShape, requests: np.ndarray, group: int, rows: int) -> TilePlan:
    tokens_each = rows // group
    query_lens = shape.query_lens[requests]
    num_tiles = -(-query_lens // tokens_each)
    tile_requests = np.repeat(requests, num_tiles)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    tile_indices = np.arange(len(tile_requests)) - np.repeat(first_tiles, num_tiles)
    tokens = shape.query_starts[tile_requests] + tile_indices * tokens_each
    return TilePlan(
        tile_requests.astype(np.int32),
        tokens.astype(np.int32),
        rows,
        int(shape.seq_lens[requests].max()),
        int(query_lens.max()),
    )
