"""Operators that the simulated GPU computes in its own way, in plain torch.

The project's have the arguments of the Triton kernels. These are compared with float64 in Triton's interpreter, which
would take minutes for a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor


def write_kv(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, layer: int) -> None:
    """See actors/model/attention/triton_kernels/operators.py."""
    block_size = kv_cache.shape[4]
    kept = torch.nonzero(slots >= 0)[:, 0]
    slots_kept = slots[kept].long()
    for index, states in enumerate((key, value)):
        kv_cache[:, :, layer, index][slots_kept // block_size, :, slots_kept % block_size] = states[:, kept].transpose(
            0, 1
        )


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
    layer: int,
    scaling: float,
    softcap: float,
    window: int,
    is_causal: bool,
    sinks: Tensor | None = None,
) -> None:
    """See actors/model/attention/triton_kernels/operators.py."""
    block_size = kv_cache.shape[4]
    group = query.shape[0] // kv_cache.shape[1]
    for request, first in zip(tile_requests.tolist(), tile_tokens.tolist(), strict=True):
        query_end, seq_len = int(query_starts[request + 1]), int(seq_lens[request])
        stop = min(first + rows // group, query_end)
        if seq_len == 0:
            output[first:stop] = 0
            continue
        blocks = block_tables[request, : -(-seq_len // block_size)].long()
        tiles = kv_cache[:, :, layer][blocks].permute(2, 1, 0, 3, 4)
        keys, values = tiles.reshape(2, kv_cache.shape[1], -1, kv_cache.shape[5])[:, :, :seq_len]
        positions = seq_len - query_end + torch.arange(first, stop)
        scores = query[:, first:stop] @ keys.repeat_interleave(group, 0).transpose(1, 2) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        keys_at = torch.arange(seq_len)
        hidden = keys_at > positions[:, None] if is_causal else torch.zeros(stop - first, seq_len, dtype=torch.bool)
        if window:
            hidden = hidden | (keys_at <= positions[:, None] - window)
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
