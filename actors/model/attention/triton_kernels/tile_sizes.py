"""How large the kernels' tiles are, and how many warps and pipeline stages each kernel has.

The table is small on purpose. What decides, in this order:

- **Registers.** A program holds the result, rows * head_dim in float32, and the scores, rows * keys. At 255 registers a
  thread a program with w warps holds 8160 * w numbers, so 64 rows need 4 warps up to a head size of 128, and 8 warps
  above. No kernel of the table spills registers to memory (a test compiles each of them). Heads of 80, 96 and 112
  numbers, and the tiles of 16 rows for heads of 64, have three pipeline stages for that reason: with two, ptxas spills
  one or two numbers although registers are free (benchmarks/RESULTS.md).
- **Shared memory.** Keys and values of the next tiles are loaded while one is computed: 2 * keys * head_dim * stages
  numbers. A program stays below 99 KiB, which the smaller GPUs of compute capability 8.6 and 8.9 have.
- **Matrix units.** They multiply 16 rows at least. Decoding is bound by memory: 16 rows, most of them empty, cost
  nothing beside the keys' way from memory. A prefill is bound by computing, so its tiles have 64 or 128 rows.
- **float32** has no matrix unit of its own precision. Its tiles have 32 rows at most, since each thread multiplies by
  itself and the compiler spills with 64.

No GPU was at hand when this table was made: it follows from what compilers report (benchmarks/triton_kernels.py), and
from the tiles of published kernels (FlashAttention-2, vLLM's unified attention), not from measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

MAX_HEAD_DIM: Final = 512
MAX_GROUP: Final = 64
"""Query heads of one KV head, at most: each token needs as many rows, and a tile has at least one token."""


@dataclass(frozen=True, slots=True)
class TileSize:
    """The sizes with which one kernel is compiled and started.

    rows: query rows of a program
    keys: keys that are loaded at once
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def pad_head_dim(head_dim: int) -> int:
    """Return the power of two that a head is filled up to, at least 16: Triton's tiles have no other sizes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def short_rows(group: int, num_tokens: int) -> int:
    """Return how many rows a tile needs for requests of up to num_tokens tokens: 16, 32 or 64."""
    return max(16, 1 << (group * num_tokens - 1).bit_length())


@dataclass(frozen=True, slots=True)
class MostRows:
    """The most rows of a tile: of a request with few tokens, which has one tile, and of one with many."""

    short: int
    long: int


def most_rows(head_dim: int, dtype: torch.dtype) -> MostRows:
    """Return how many rows a tile can have without spills."""
    if pad_head_dim(head_dim) > 256:
        return MostRows(16, 16) if dtype is torch.float32 else MostRows(32, 32)
    if dtype is torch.float32:
        return MostRows(32, 32)
    return MostRows(32, 64) if pad_head_dim(head_dim) > 128 else MostRows(64, 128)


def tile_size(rows: int, head_dim: int, dtype: torch.dtype) -> TileSize:
    """Return the tile of attend_kernel for this many rows: 16, 32, 64 or 128."""
    is_wide = pad_head_dim(head_dim) > 128
    if pad_head_dim(head_dim) > 256:
        return TileSize(rows, 16 if dtype is torch.float32 else 32, 8, 1)
    if dtype is torch.float32:
        return TileSize(rows, 16 if is_wide else 32, 8 if is_wide or rows > 16 else 4, 1)
    spills_with_two = pad_head_dim(head_dim) == 128 != head_dim or (pad_head_dim(head_dim) == 64 and rows == 16)
    num_stages = 3 if spills_with_two else 2
    return TileSize(rows, 32 if is_wide else 64, 8 if rows > 64 or (is_wide and rows > 32) else 4, num_stages)
