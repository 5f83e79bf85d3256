"""The part of a rank's KV cache that one link moves: the heads that both ends hold, cut into pieces.

layout.py has the arithmetic. Where a block is one piece, its bytes are sent and received in place. Where a block holds
several pieces, a chunk goes through a buffer of its own: it is gathered into the buffer before it is sent, and
scattered into the cache once it has been received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout, piece_ids, piece_runs, piece_size


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A chunk and the buffer that it travels through. The link's data thread calls both methods.

    rows:   [n, run bytes] uint8, the whole cache on this rank
    index:  [m] int64, the chunk's rows, in the order in which they travel
    buffer: [m, run bytes] uint8, the chunk's bytes, in the same order
    unused: [u] int64, the rows of the chunk's last block that come after the chunk
    """

    rows: Tensor
    index: Tensor
    buffer: Tensor
    unused: Tensor

    def gather(self) -> None:
        """Copy the chunk out of the cache, before it is sent."""
        torch.index_select(self.rows, 0, self.index, out=self.buffer)

    def scatter(self) -> None:
        """Copy the chunk into the cache, after it was received, and zero the rest of its last block.

        The next chunk may overwrite the zeros. Invariant: a slot that was not written holds finite numbers, because
        attention multiplies weights of zero with what a masked slot holds.
        """
        self.rows.index_copy_(0, self.index, self.buffer)
        self.rows.index_fill_(0, self.unused, 0)


class PieceMap:
    """Maps blocks of one link's end to the pieces that travel on the link, and pieces to memory.

    piece_tokens:          tokens of a piece
    pieces_per_block:      pieces in a block of this end; peer_pieces_per_block: in a block of the peer
    piece_size_bytes:      bytes of a piece, of the heads that both ranks hold
    peer_tp_size:          the peer's number of ranks
    """

    def __init__(self, layout: KVCacheLayout, peer: KVCacheLayout, kv_cache: Tensor) -> None:
        """layout: of kv_cache, this end's cache; peer: the other end's layout. Both have passed the handshake."""
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
        """Return the pieces of these blocks, in order."""
        return piece_ids(block_ids, self.pieces_per_block)

    def messages(self, pieces: Sequence[int]) -> tuple[Sequence[Tensor], StagedChunk | None]:
        """Return one contiguous tensor for each piece, and the staged chunk if the tensors are not the cache itself.

        Each tensor is [shared heads, num_layers, 2, piece_tokens, head_dim], of the cache's dtype; all have this shape
        at both ends.
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
    """Return the range of the model's KV heads that both ranks hold; it is empty if they share none."""
    ours, theirs = layout.kv_heads, peer.kv_heads
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
