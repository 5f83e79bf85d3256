"""A rank's cache as one link sees it: the heads that both ends hold, cut into the pieces that both ends can name.

See layout.py for the arithmetic. Where a block is one piece, its bytes are sent and received in place. Where it holds
several, a chunk goes through a buffer of its own: gathered before it is sent, scattered once it has been received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout, piece_ids, piece_runs, piece_size


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A chunk's way through a buffer. Both calls belong to the link's data thread.

    rows:   [n, run bytes] uint8, the whole cache
    index:  [m] int64, the chunk's rows in the order of the wire
    buffer: [m, run bytes] uint8
    unused: [u] int64, rows of the chunk's last block behind it
    """

    rows: Tensor
    index: Tensor
    buffer: Tensor
    unused: Tensor

    def gather(self) -> None:
        """Before it is sent: copy it out of the cache."""
        torch.index_select(self.rows, 0, self.index, out=self.buffer)

    def scatter(self) -> None:
        """After it was received: copy it into the cache.

        What is behind it in its last block becomes zero, or is overwritten by the next chunk. Invariant: a slot that
        was not written holds finite numbers, as masked scores are multiplied by what it holds.
        """
        self.rows.index_copy_(0, self.index, self.buffer)
        self.rows.index_fill_(0, self.unused, 0)


class PieceMap:
    """What travels on one link, at one of its ends."""

    def __init__(self, layout: KVCacheLayout, peer: KVCacheLayout, kv_cache: Tensor) -> None:
        """The two must have passed the handshake; kv_cache is the one that layout describes."""
        self.piece_tokens = piece_size(layout.block_size, peer.block_size)
        self.pieces_per_block = layout.block_size // self.piece_tokens
        self.peer_tp_size = peer.tp_size
        self.peer_pieces_per_block = peer.block_size // self.piece_tokens
        self._layout = layout
        self._kv_heads = shared_kv_heads(layout, peer)
        self.piece_size_bytes = len(self._kv_heads) * self.piece_tokens * layout.token_size_bytes
        first_head = self._kv_heads.start - layout.kv_heads.start
        self._heads = slice(first_head, first_head + len(self._kv_heads))
        self._kv_cache = kv_cache

    def ids(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The pieces of these blocks."""
        return piece_ids(block_ids, self.pieces_per_block)

    def messages(self, pieces: Sequence[int]) -> tuple[Sequence[Tensor], StagedChunk | None]:
        """One contiguous tensor for each piece, and what has to be done with them if they are not the cache itself.

        Each is [heads, num_layers, 2, piece_tokens, head_dim], at both ends.
        """
        if self.pieces_per_block == 1:
            return [self._kv_cache[piece, self._heads] for piece in pieces], None
        runs = piece_runs(self._layout, self._kv_heads, self.piece_tokens, pieces)
        rows = self._kv_cache.view(-1).view(torch.uint8).view(-1, runs.size_bytes)
        index = torch.from_numpy(runs.starts // runs.size_bytes)
        buffer = rows.new_empty(len(index), runs.size_bytes)
        chunk = StagedChunk(rows, index, buffer, self._unused_rows(pieces[-1]))
        shape = (len(pieces), len(self._kv_heads), self._layout.num_layers, 2, self.piece_tokens, self._layout.head_dim)
        return list(buffer.view(-1).view(self._kv_cache.dtype).view(shape)), chunk

    def _unused_rows(self, last_piece: int) -> Tensor:
        block_end = (last_piece // self.pieces_per_block + 1) * self.pieces_per_block
        runs = piece_runs(self._layout, self._kv_heads, self.piece_tokens, range(last_piece + 1, block_end))
        return torch.from_numpy(runs.starts // runs.size_bytes)


def shared_kv_heads(layout: KVCacheLayout, peer: KVCacheLayout) -> range:
    """The model's KV heads that both ranks hold."""
    ours, theirs = layout.kv_heads, peer.kv_heads
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
