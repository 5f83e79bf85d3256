"""Attention in memory that stays: what a graph of decode steps can record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from actors.model.attention.batch_attention import BatchAttention


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A batch of one token for each request, in memory that a graph reads; all int32, on the device.

    slots:        [size], block * block_size + offset of each token; -1 for a row without a request
    seq_lens:     [size], tokens in the cache after the step; 0 for a row without a request
    query_starts: [size + 1]: 0, 1, 2 and so on
    requests:     [size]: 0, 1, 2 and so on
    block_tables: [size, max_blocks]; entries beyond a request's length are not read
    """

    slots: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    requests: Tensor
    block_tables: Tensor


@runtime_checkable
class StaticAttention(Protocol):
    """An attention backend whose work a graph can record."""

    @property
    def kv_cache(self) -> Tensor:
        """See AttentionBackend."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    def decode(self, batch: StaticBatch, max_seq_len: int) -> BatchAttention:
        """Return the attention of a batch. max_seq_len: the most tokens of a request in any step that uses it

        Blocks that begin in a step are not filled with zeros: who uses this does it before the step.
        """
