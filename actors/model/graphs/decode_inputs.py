"""The memory from which decode graphs read their step: it stays where it is, and each step is written into it.

A batch that is smaller than its graph is filled up with rows without a request. Such a row computes token 0 at position
0; its key and value have no slot, so they are written nowhere, and it attends to no key. Its logits are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.static_batch import StaticBatch
from actors.model.launched_step import LateTokens
from actors.model.lora.lora_step import NO_SLOT
from actors.model.uploads import upload

_TOKEN, _POSITION, _SLOT, _SEQ_LEN, _ADAPTER = range(5)
_NOTHING: Final = np.array([0, 0, -1, 0, NO_SLOT], dtype=np.int32)
"""A row without a request."""
_ALIGNMENT: Final = 4
"""Each row of numbers begins at a multiple of 16 bytes, as Triton's kernels expect of their arguments."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which each request computes one token.

    token_ids, positions, slots, seq_lens: [num_requests]; slots: block * block_size + offset
    adapter_slots: [num_requests], NO_SLOT for a request without an adapter; None if no request has one
    block_tables:  [num_requests, num_blocks]
    begun_blocks:  [n], the blocks that become zeros before the step
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    begun_blocks: np.ndarray
    adapter_slots: np.ndarray | None = None

    def rows(self, size: int) -> np.ndarray:
        """Return the numbers of each row of a graph for `size` requests, [5, size] int32."""
        rows = np.repeat(_NOTHING[:, None], size, axis=1)
        num_requests = len(self.token_ids)
        columns = (self.token_ids, self.positions, self.slots, self.seq_lens, self.adapter_slots)
        for row, column in zip(rows, columns, strict=True):
            if column is not None:
                row[:num_requests] = column
        return rows


class DecodeInputs:
    """The memory of the largest graph's inputs; a smaller graph reads the first rows of it."""

    def __init__(self, max_size: int, max_blocks: int, device: torch.device) -> None:
        """max_blocks: of the longest possible request"""
        padded = -(-(max_size + 1) // _ALIGNMENT) * _ALIGNMENT
        self._numbers = torch.zeros(len(_NOTHING), padded, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_size, max_blocks, dtype=torch.int32, device=device)
        self._counting = torch.arange(padded, dtype=torch.int32, device=device)
        self.indices = torch.arange(max_size, device=device)
        """[max_size] int64: 0, 1, 2 and so on."""

    def write(self, step: DecodeStep, size: int, kv_cache: Tensor, late: LateTokens | None = None) -> None:
        """Queue a step's upload into the memory of a graph of this size, and fill its begun blocks with zeros.

        late: tokens that only the device knows
        """
        arrays = [step.rows(size), step.block_tables, step.begun_blocks]
        rows, tables, begun = upload([array.astype(np.int32) for array in arrays], kv_cache.device)
        self._numbers[:, :size].copy_(rows)
        if late is not None:
            self._numbers[_TOKEN].index_copy_(0, late.indices, late.token_ids.int())
        self._block_tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        if len(step.begun_blocks):
            kv_cache.index_fill_(0, begun.long(), 0)

    def clear(self) -> None:
        """Take the request out of every row."""
        self._numbers.copy_(upload([_NOTHING], self._numbers.device)[0][:, None])

    def token_ids(self, size: int) -> Tensor:
        """[size] int64, made anew from the memory each time."""
        return self._numbers[_TOKEN, :size].long()

    def positions(self, size: int) -> Tensor:
        """[size] int64, made anew from the memory each time."""
        return self._numbers[_POSITION, :size].long()

    def adapter_slots(self, size: int) -> Tensor:
        """[size] int32."""
        return self._numbers[_ADAPTER, :size]

    def attention(self, size: int) -> StaticBatch:
        """Return what attention reads."""
        return StaticBatch(
            slots=self._numbers[_SLOT, :size],
            seq_lens=self._numbers[_SEQ_LEN, :size],
            query_starts=self._counting[: size + 1],
            requests=self._counting[:size],
            block_tables=self._block_tables[:size],
        )
