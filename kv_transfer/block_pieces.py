"""The part of a rank's KV cache that one link moves: the heads that both ends hold, cut into pieces.

layout.py has the arithmetic. Where a block is one piece, its bytes are sent and received in place. Where a block holds
several pieces, a chunk goes through a buffer of its own: it is gathered into the buffer before it is sent, and
scattered into the cache once it has been received. If a model's layers form several groups, a block is one piece, and
travels as one run for each group of which the two ranks share heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.layout import BlockGroup, KVCacheLayout, piece_ids, piece_runs, piece_size, plan_transfer


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
    runs_per_piece:        the tensors of a piece: one for each group of which the link moves heads
    peer_tp_size:          the peer's number of ranks
    """

    def __init__(self, layout: KVCacheLayout, peer: KVCacheLayout, kv_cache: Tensor, *, is_producer: bool) -> None:
        """Plan a link whose handshake has passed.

        layout: of kv_cache, this end's cache; peer: the other end's layout; is_producer: whether this end sends
        """
        self.piece_tokens = piece_size(layout.block_size, peer.block_size)
        self.pieces_per_block = layout.block_size // self.piece_tokens
        self.peer_tp_size = peer.tp_size
        self.peer_pieces_per_block = peer.block_size // self.piece_tokens
        assert layout.is_plain or self.pieces_per_block == self.peer_pieces_per_block == 1, "the handshake refuses this"
        self._layout = layout
        self._kv_heads = shared_kv_heads(layout, peer)
        runs = _shared_runs(layout, peer, is_producer=is_producer)
        self.piece_size_bytes = sum(len(run) for run in runs) // self.pieces_per_block
        self.runs_per_piece = len(runs)
        itemsize = layout.dtype_size_bytes
        self._runs = [slice(run.start // itemsize, run.stop // itemsize) for run in runs]
        self._kv_cache = kv_cache
        self._blocks = kv_cache.view(len(kv_cache), -1)

    def ids(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the pieces of these blocks, in order."""
        return piece_ids(block_ids, self.pieces_per_block)

    def messages(self, pieces: Sequence[int]) -> tuple[Sequence[Tensor], StagedChunk | None]:
        """Return contiguous tensors, one for each piece and group, and the staged chunk if they are not in the cache.

        The tensors have the cache's dtype, and the same sizes in the same order at both ends.
        """
        if self.pieces_per_block == 1:
            return [self._blocks[piece, run] for piece in pieces for run in self._runs], None
        runs = piece_runs(self._layout, self._kv_heads, self.piece_tokens, pieces)
        rows = self._kv_cache.view(-1).view(torch.uint8).view(-1, runs.size_bytes)
        index = torch.from_numpy(runs.starts // runs.size_bytes)
        buffer = rows.new_empty(len(index), runs.size_bytes)
        chunk = StagedChunk(rows, index, buffer, self._unused_rows(pieces[-1]))
        return list(buffer.view(-1).view(self._kv_cache.dtype).view(len(pieces), -1)), chunk

    def _unused_rows(self, last_piece: int) -> Tensor:
        block_end = (last_piece // self.pieces_per_block + 1) * self.pieces_per_block
        runs = piece_runs(self._layout, self._kv_heads, self.piece_tokens, range(last_piece + 1, block_end))
        return torch.from_numpy(runs.starts // runs.size_bytes)


def shared_kv_heads(layout: KVCacheLayout, peer: KVCacheLayout) -> range:
    """Return the range of the first group's KV heads that both ranks hold; it is empty if they share none."""
    return _common(layout.kv_heads, peer.kv_heads)


def share_any_kv_heads(layout: KVCacheLayout, peer: KVCacheLayout) -> bool:
    """Whether both ranks hold a KV head of any group. The layouts have the same groups."""
    pairs = zip(layout.block_groups, peer.block_groups, strict=True)
    return any(_common(ours.kv_heads, theirs.kv_heads) for ours, theirs in pairs)


def _common(ours: range, theirs: range) -> range:
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def _shared_runs(layout: KVCacheLayout, peer: KVCacheLayout, *, is_producer: bool) -> list[range]:
    """Return the bytes of this end's blocks that travel: one run for each group of which the plan gives the link heads.

    A head that several of the producer's ranks hold travels on one link only. The links of a plain layout that are not
    in the plan move nothing, so the plan need not be asked.
    """
    if layout.is_plain:
        [group] = layout.block_groups
        return [_run_of(group, shared_kv_heads(layout, peer))]
    producer, consumer = (layout, peer) if is_producer else (peer, layout)
    return [
        _run_of(group, route.kv_heads)
        for group in layout.block_groups
        for route in plan_transfer(group.total_num_kv_heads, producer.tp_size, consumer.tp_size)
        if (route.producer_rank, route.consumer_rank) == (producer.tp_rank, consumer.tp_rank)
    ]


def _run_of(group: BlockGroup, kv_heads: range) -> range:
    start = group.offset_bytes + (kv_heads.start - group.kv_heads.start) * group.head_size_bytes
    return range(start, start + len(kv_heads) * group.head_size_bytes)
