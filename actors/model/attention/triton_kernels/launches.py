"""Lists what a kernel is started with: its grid and all its arguments. Nothing is started here.

operators.py starts the launches, and a test compiles them for GPUs that are not there. So both have the same arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.attention.triton_kernels.tile_sizes import TileSize, pad_head_dim, tile_size
from kv_transfer.device_kind import is_accelerator

WRITE_TOKENS = 16
"""Tokens that one program of write_kernel writes."""
MAX_PARTS = 32
"""A tile's keys are split into this many parts at most; combine_kernel loads all of a row's parts at once."""
_MIN_PART_KEYS = 256
"""A part has at least this many keys, so that putting parts together costs little beside reading them."""
_PROGRAMS_PER_PROCESSOR = 2
"""Programs that one multiprocessor should have at least, so that one computes while the other waits for memory."""

Argument = Tensor | int | float | bool
"""An argument of a kernel."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel.

    kernel:    the kernel's name in kernels.py
    grid:      how many programs, in each of three dimensions
    arguments: all of the kernel's arguments by name; those in capitals are known to the compiler
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Argument]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options. Products and sums are fused: Triton 3.9 warns if nobody says whether."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a launch, and the requests that they belong to, on the device.

    requests, tokens: [num_tiles] int32
    query_starts: [num_requests + 1] int32
    seq_lens:     [num_requests] int32
    block_tables: [num_requests, max_blocks] int32
    rows, max_tokens: of a tile; max_tokens * group rows at most hold a token
    """

    requests: Tensor
    tokens: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    rows: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The place of a layer's keys and values in the KV cache, in numbers of its dtype.

    start:        of the first head's tile of keys in a block
    head_stride, block_stride: from one to the next
    block_size:   tokens of a block
    num_kv_heads: of the layer
    """

    start: int
    head_stride: int
    block_stride: int
    block_size: int
    num_kv_heads: int

    @property
    def numbers(self) -> list[int]:
        """All of these numbers, in the order in which operators take them."""
        return [self.start, self.head_stride, self.block_stride, self.block_size, self.num_kv_heads]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention that a layer asks for.

    softcap, window, chunk: 0 without one
    """

    place: CachePlace
    scaling: float
    softcap: float
    window: int
    chunk: int
    is_causal: bool


def choose_num_parts(num_programs: int, max_keys: int, num_processors: int) -> int:
    """Return into how many parts a tile's keys are split, so that a small batch keeps the whole GPU busy.

    num_programs: without a split: tiles times KV heads
    max_keys: the most keys that a tile reads
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    return max(1, min(wanted, MAX_PARTS, -(-max_keys // _MIN_PART_KEYS)))


def write_launch(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, place: CachePlace) -> Launch:
    """Return the launch that writes a layer's keys and values.

    key: [num_kv_heads, num_tokens, key_size]; value: [num_kv_heads, num_tokens, value_size]; the last dimension is
        contiguous
    slots: [num_tokens] int32
    """
    num_kv_heads, num_tokens, key_size = key.shape
    arguments: dict[str, Argument] = {
        "key": key,
        "value": value,
        "kv_cache": kv_cache,
        "slots": slots,
        "num_tokens": num_tokens,
        "key_head_stride": key.stride(0),
        "key_token_stride": key.stride(1),
        "value_head_stride": value.stride(0),
        "value_token_stride": value.stride(1),
        **_cache_arguments(place, key_size, value.shape[2]),
        "TOKENS": WRITE_TOKENS,
    }
    num_warps = 4 if pad_head_dim(max(key_size, value.shape[2])) >= 128 else 2
    return Launch("write_kernel", (-(-num_tokens // WRITE_TOKENS), num_kv_heads, 1), arguments, num_warps, 1)


def attend_launch(
    query: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    tiles: Tiles,
    call: LayerCall,
    parts: tuple[Tensor, ...] = (),
    sinks: Tensor | None = None,
) -> Launch:
    """Return the launch that computes the attention of all tiles.

    query:  [num_heads, num_tokens, key_size], the last dimension contiguous
    output: [num_tokens, num_heads, value_size], contiguous
    parts:  as make_parts() returns them, or empty: the keys are not split
    sinks:  [num_heads], the score of each head's sink; None: the layer has none
    """
    num_kv_heads, key_size, value_size = call.place.num_kv_heads, query.shape[2], output.shape[2]
    size = tile_size(tiles.rows, max(key_size, value_size), kv_cache.dtype)
    values, maxima, sums = parts or (output, output, output)
    arguments: dict[str, Argument] = {
        "query": query,
        "kv_cache": kv_cache,
        "output": output,
        "part_values": values,
        "part_maxima": maxima,
        "part_sums": sums,
        "sinks": query if sinks is None else sinks,
        "tile_requests": tiles.requests,
        "tile_tokens": tiles.tokens,
        "query_starts": tiles.query_starts,
        "seq_lens": tiles.seq_lens,
        "block_tables": tiles.block_tables,
        "score_scale": call.scaling if call.softcap else call.scaling * math.log2(math.e),
        "softcap": call.softcap,
        "window": call.window,
        "chunk": call.chunk,
        "query_head_stride": query.stride(0),
        "query_token_stride": query.stride(1),
        "output_token_stride": output.stride(0),
        **_cache_arguments(call.place, key_size, value_size),
        "table_stride": tiles.block_tables.stride(0),
        "GROUP": query.shape[0] // num_kv_heads,
        "ROWS": size.rows,
        "KEYS": size.keys,
        "IS_CAUSAL": call.is_causal,
        "HAS_WINDOW": call.window > 0,
        "HAS_CHUNK": call.chunk > 0,
        "HAS_SOFTCAP": call.softcap > 0,
        "HAS_SINKS": sinks is not None,
        "IS_SPLIT": bool(parts),
        "UPCAST": not is_accelerator(query.device),
    }
    num_parts = values.shape[2] if parts else 1
    return _launch("attend_kernel", (len(tiles.requests), num_kv_heads, num_parts), arguments, size)


def make_parts(output: Tensor, tiles: Tiles, place: CachePlace, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what the programs of a tile leave for combine_kernel: values, maxima and sums, float32."""
    shape = (len(tiles.requests), place.num_kv_heads, num_parts, tiles.rows)
    values = output.new_empty((*shape, pad_head_dim(output.shape[2])), dtype=torch.float32)
    return values, output.new_empty(shape, dtype=torch.float32), output.new_empty(shape, dtype=torch.float32)


def combine_launch(output: Tensor, tiles: Tiles, parts: tuple[Tensor, ...]) -> Launch:
    """Return the launch that puts the parts together."""
    num_kv_heads, value_size = parts[0].shape[1], output.shape[2]
    group = output.shape[1] // num_kv_heads
    values, maxima, sums = parts
    arguments: dict[str, Argument] = {
        "part_values": values,
        "part_maxima": maxima,
        "part_sums": sums,
        "output": output,
        "tile_requests": tiles.requests,
        "tile_tokens": tiles.tokens,
        "query_starts": tiles.query_starts,
        "num_parts": values.shape[2],
        "output_token_stride": output.stride(0),
        "GROUP": group,
        "VALUE_SIZE": value_size,
        "VALUE_SIZE_PADDED": values.shape[4],
        "ROWS": tiles.rows,
        "MAX_PARTS": MAX_PARTS,
    }
    grid = (len(tiles.requests), num_kv_heads, min(tiles.max_tokens, tiles.rows // group) * group)
    return Launch("combine_kernel", grid, arguments, 4, 1)


def _cache_arguments(place: CachePlace, key_size: int, value_size: int) -> dict[str, Argument]:
    return {
        "block_stride": place.block_stride,
        "head_stride": place.head_stride,
        "layer_start": place.start,
        "KEY_SIZE": key_size,
        "KEY_SIZE_PADDED": pad_head_dim(key_size),
        "VALUE_SIZE": value_size,
        "VALUE_SIZE_PADDED": pad_head_dim(value_size),
        "BLOCK_SIZE": place.block_size,
    }


def _launch(kernel: str, grid: tuple[int, int, int], arguments: dict[str, Argument], size: TileSize) -> Launch:
    return Launch(kernel, grid, arguments, size.num_warps, size.num_stages)
