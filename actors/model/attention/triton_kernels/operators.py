"""The kernels as operators of torch: raypd::write_kv and raypd::attend_tiles.

As operators they have fake implementations: a step can be walked with tensors that hold no numbers, and torch.compile
takes them as they are. Their arguments that decide grids and compiled variants are numbers of the host; all else stays
on the device. No operator waits for the device, so a CUDA graph can capture each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library
from triton.errors import TritonError

from actors.model.attention.triton_kernels import kernels
from actors.model.attention.triton_kernels.launches import (
    CachePlace,
    Launch,
    LayerCall,
    Tiles,
    attend_launch,
    combine_launch,
    make_parts,
    write_launch,
)


@library.custom_op("raypd::write_kv", mutates_args=("kv_cache",))
def write_kv(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, place: Sequence[int]) -> None:
    """Write a layer's keys and values into their slots.

    kv_cache: [num_blocks, ...], contiguous
    key: [num_kv_heads, num_tokens, key_size]; value: [num_kv_heads, num_tokens, value_size]; of the cache's dtype
    slots: [num_tokens] int32, block * block_size + offset; a token with a negative slot is not written
    place: CachePlace.numbers
    """
    start(write_launch(_with_dense_rows(key), _with_dense_rows(value), kv_cache, slots, CachePlace(*place)))


@library.custom_op("raypd::attend_tiles", mutates_args=("output",))
def attend_tiles(
    output: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    tile_requests: Tensor,
    tile_tokens: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    rows: int,
    max_tokens: int,
    num_parts: int,
    place: Sequence[int],
    scaling: float,
    softcap: float,
    window: int,
    chunk: int,
    is_causal: bool,
    sinks: Tensor | None = None,
) -> None:
    """Attend with the tokens of all tiles, and write their rows of output. Other rows stay as they are.

    output: [num_tokens, num_heads, value_size], contiguous; query: [num_heads, num_tokens, key_size]
    tile_requests, tile_tokens: [num_tiles] int32, the request and the first token of each tile
    query_starts: [num_requests + 1] int32; seq_lens: [num_requests] int32. A request with a seq_len of 0 fills up a
        batch of fixed size: its tokens' rows become zeros
    block_tables: [num_requests, max_blocks] int32
    rows: 16, 32, 64 or 128; a tile holds rows // group tokens
    max_tokens: the most tokens that a request of these tiles computes
    num_parts: into how many parts a tile's keys are split
    place: CachePlace.numbers
    softcap, window, chunk: 0 stands for none
    sinks: [num_heads], contiguous, of any floating type: the score of each head's sink
    """
    tiles = Tiles(tile_requests, tile_tokens, query_starts, seq_lens, block_tables, rows, max_tokens)
    call = LayerCall(CachePlace(*place), scaling, softcap, window, chunk, is_causal)
    queries = _with_dense_rows(query)
    if num_parts == 1:
        start(attend_launch(queries, kv_cache, output, tiles, call, sinks=sinks))
        return
    parts = make_parts(output, tiles, call.place, num_parts)
    start(attend_launch(queries, kv_cache, output, tiles, call, parts, sinks))
    start(combine_launch(output, tiles, parts))


def start(launch: Launch) -> None:
    """Start a kernel, or run it in Triton's interpreter if that was asked for before Triton was imported.

    Raises RuntimeError, as torch's own operators do, if Triton cannot compile the kernel for the device.
    """
    kernel = getattr(kernels, launch.kernel)
    try:
        kernel[launch.grid](**launch.arguments, **launch.options)
    except TritonError as failed:
        raise RuntimeError(f"Triton cannot compile {launch.kernel}: {failed}") from failed


@write_kv.register_fake
def _(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, place: Sequence[int]) -> None:
    _check_same_device(kv_cache, key, value, slots)
    assert key.shape[:2] == value.shape[:2] == (CachePlace(*place).num_kv_heads, slots.shape[0])
    assert key.dtype == value.dtype == kv_cache.dtype
    assert slots.dtype == torch.int32


@attend_tiles.register_fake
def _(
    output: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    tile_requests: Tensor,
    tile_tokens: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    rows: int,
    max_tokens: int,
    num_parts: int,
    place: Sequence[int],
    scaling: float,
    softcap: float,
    window: int,
    chunk: int,
    is_causal: bool,
    sinks: Tensor | None = None,
) -> None:
    arrays = (tile_requests, tile_tokens, query_starts, seq_lens, block_tables)
    _check_same_device(output, query, kv_cache, *arrays, *(() if sinks is None else (sinks,)))
    assert sinks is None or (sinks.shape == query.shape[:1] and sinks.is_contiguous())
    assert query.shape[:2] == (output.shape[1], output.shape[0])
    assert output.dtype == query.dtype == kv_cache.dtype
    assert all(array.dtype == torch.int32 for array in arrays)


def _check_same_device(*tensors: Tensor) -> None:
    devices = {tensor.device for tensor in tensors}
    assert len(devices) == 1, f"tensors of one kernel lie on {sorted(map(str, devices))}"


def _with_dense_rows(states: Tensor) -> Tensor:
    """Return the tensor, or a copy if the numbers of a head do not lie side by side."""
    return states if states.stride(-1) == 1 else states.contiguous()
