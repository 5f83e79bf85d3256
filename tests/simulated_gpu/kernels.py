"""Operators that the simulated GPU computes in its own way, in plain torch.

The project's have the arguments of the Triton kernels. These are compared with float64 in Triton's interpreter, which
would take minutes for a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor


def _tiles(kv_cache: Tensor, place: Sequence[int], key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values, [num_blocks, num_kv_heads, block_size, key_size or value_size]."""
    start, head_stride, block_stride, block_size, num_kv_heads = place
    keys, values = (
        kv_cache.as_strided(
            (kv_cache.shape[0], num_kv_heads, block_size, size), (block_stride, head_stride, size, 1), start + behind
        )
        for size, behind in ((key_size, 0), (value_size, block_size * key_size))
    )
    return keys, values


def write_kv(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, place: Sequence[int]) -> None:
    """See actors/model/attention/triton_kernels/operators.py."""
    block_size = place[3]
    kept = torch.nonzero(slots >= 0)[:, 0]
    slots_kept = slots[kept].long()
    for tiles, states in zip(_tiles(kv_cache, place, key.shape[2], value.shape[2]), (key, value), strict=True):
        tiles[slots_kept // block_size, :, slots_kept % block_size] = states[:, kept].transpose(0, 1)


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
    """See actors/model/attention/triton_kernels/operators.py."""
    *_, block_size, num_kv_heads = place
    group = query.shape[0] // num_kv_heads
    cached = _tiles(kv_cache, place, query.shape[2], output.shape[2])
    for request, first in zip(tile_requests.tolist(), tile_tokens.tolist(), strict=True):
        query_end, seq_len = int(query_starts[request + 1]), int(seq_lens[request])
        stop = min(first + rows // group, query_end)
        if seq_len == 0:
            output[first:stop] = 0
            continue
        blocks = block_tables[request, : -(-seq_len // block_size)].long()
        keys, values = (tiles[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len] for tiles in cached)
        positions = seq_len - query_end + torch.arange(first, stop)
        scores = query[:, first:stop] @ keys.repeat_interleave(group, 0).transpose(1, 2) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        keys_at = torch.arange(seq_len)
        hidden = keys_at > positions[:, None] if is_causal else torch.zeros(stop - first, seq_len, dtype=torch.bool)
        if window:
            hidden = hidden | (keys_at <= positions[:, None] - window)
        if chunk:
            hidden = hidden | (keys_at // chunk != positions[:, None] // chunk)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, stop - first, 1).to(scores.dtype)], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        output[first:stop] = (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


def histc(numbers: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002  # torch's names
    """Count integers, which a GPU does and torch's operator on a CPU does not."""
    counts = torch.histc(numbers.double(), bins, min, max)
    return counts.to(numbers.dtype)


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "raypd::write_kv": write_kv,
    "raypd::attend_tiles": attend_tiles,
    "aten::histc": histc,
}
