"""A KV block, byte for byte, and the arithmetic of transfers between ends with different layouts.

The two ends of a transfer may differ in two ways, and both come down to arithmetic on one memory order:

- Tensor-parallel sizes. Each rank holds a range of the model's KV heads, or one head together with other ranks (its
  replicas) when there are fewer heads than ranks. plan_transfer() decides which producer rank sends which heads to
  which consumer rank.
- Block sizes, one a multiple of the other, if keys have the plain order. Pieces travel: a piece is the KV of as many
  tokens as the smaller block has, for a range of heads and all layers. Piece p of a cache is the (p % k)-th part of
  block p // k, with k pieces in a block. On the wire a piece is [heads, num_layers, 2, piece tokens, head_dim]. Where a
  block is one piece, the piece is one contiguous run of memory; where a block holds several, a piece is one run for
  each head, layer, and key or value. piece_runs() lists the runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from kv_transfer.message_ranges import Count, PositiveCount, Word

MAX_TP_SIZE: Final = 1024
_MAX_GROUPS: Final = 64
_MAX_DIMENSION: Final = 2**20


class KeyOrder(StrEnum):
    """The order of K's numbers in a tile, which is one block of one head and layer. V is always in the plain order.

    PLAIN:      [block_size, head_dim], token after token
    TRANSPOSED: [head_dim, block_size], so that processors multiply one number of a query with those of many tokens
    """

    PLAIN = "plain"
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The KV of those layers of a rank that differ from the layout's first ones in their shape.

    num_kv_heads:      on this rank; num_replicas as in KVCacheLayout
    key_size, value_size: numbers of one token and head; value_size is 0 for layers that store one vector only
    dtype:             the layout's
    bytes_per_request: the size of a state that does not grow with the tokens, and has no bytes in the blocks of tokens;
        0 for attention
    """

    num_layers: PositiveCount
    num_kv_heads: PositiveCount
    key_size: PositiveCount
    value_size: Count
    dtype: Word
    num_replicas: PositiveCount = 1
    bytes_per_request: Count = 0


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """One group's run of bytes in each block of a rank's cache, [num_kv_heads, num_layers, tile of K, tile of V].

    A tile of K is [block_size, key_size], in the cache's KeyOrder; a tile of V is [block_size, value_size].

    offset_bytes: of the run in the block
    total_num_kv_heads: of the model, over all ranks; kv_heads: the range of them that this rank holds
    key_tile_bytes, value_tile_bytes: of one head and layer
    """

    offset_bytes: int
    num_layers: int
    key_size: int
    value_size: int
    total_num_kv_heads: int
    kv_heads: range
    key_tile_bytes: int
    value_tile_bytes: int

    @property
    def head_size_bytes(self) -> int:
        """Bytes of one head in a block, all layers of the group."""
        return self.num_layers * (self.key_tile_bytes + self.value_tile_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the group's run."""
        return len(self.kv_heads) * self.head_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The shape of one rank's KV cache tensor, and the fingerprint that both ends of a link must share.

    The tensor is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]: a block is one contiguous run of
    bytes for all layers, and so is any range of heads of a block. If the layers differ, or V is not as wide as K, the
    tensor is [num_blocks, numbers of a block], and block_groups tells what is where in a block.

    num_kv_heads: on this rank
    dtype: the torch dtype's name, such as "float32"
    model_fingerprint: digest of the model's config and weights; KV of another model is never accepted
    num_replicas: how many neighbouring ranks hold the same KV head; 1 unless there are fewer heads than ranks
    key_order: a KeyOrder; a later version may have others, which are refused by their name
    further_groups: layers whose KV has another shape than num_kv_heads, num_layers and head_dim say
    value_size: the width of V in the first group; 0 if values are the first numbers of keys; None: as wide as head_dim
    """

    num_blocks: PositiveCount
    num_kv_heads: PositiveCount
    num_layers: PositiveCount
    block_size: PositiveCount
    head_dim: PositiveCount
    dtype: Word
    dtype_size_bytes: PositiveCount
    model_fingerprint: Word
    tp_rank: Count = 0
    tp_size: PositiveCount = 1
    num_replicas: PositiveCount = 1
    key_order: Word = KeyOrder.PLAIN
    further_groups: Annotated[tuple[KVGroup, ...], Meta(max_length=_MAX_GROUPS)] = ()
    value_size: Count | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a layout that no rank's cache can have: a layout may come from a peer."""
        limits = {
            "num_blocks": (self.num_blocks, 1, 2**31 - 1),
            "num_kv_heads": (self.num_kv_heads, 1, _MAX_DIMENSION),
            "num_layers": (self.num_layers, 1, _MAX_DIMENSION),
            "block_size": (self.block_size, 1, _MAX_DIMENSION),
            "head_dim": (self.head_dim, 1, _MAX_DIMENSION),
            "dtype_size_bytes": (self.dtype_size_bytes, 1, 16),
            "tp_size": (self.tp_size, 1, MAX_TP_SIZE),
            "tp_rank": (self.tp_rank, 0, self.tp_size - 1),
            "num_replicas": (self.num_replicas, 1, self.tp_size),
            "length of dtype": (len(self.dtype), 1, 64),
            "length of model_fingerprint": (len(self.model_fingerprint), 0, 256),
            "length of key_order": (len(self.key_order), 1, 64),
            "number of further_groups": (len(self.further_groups), 0, _MAX_GROUPS),
            "value_size": (self.value_size or 0, 0, _MAX_DIMENSION),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ValueError(f"a KV cache layout has {name} = {value}; allowed is {least} to {most}")
        self._check_heads()

    def _check_heads(self) -> None:
        for group in self.groups:
            num_rank_heads, num_left = divmod(group.num_kv_heads * self.tp_size, group.num_replicas)
            if num_left or len(rank_kv_heads(num_rank_heads, self.tp_size, self.tp_rank)) != group.num_kv_heads:
                raise ValueError(
                    f"a KV cache layout has {group.num_kv_heads} KV heads on each of {self.tp_size} ranks and "
                    f"num_replicas = {group.num_replicas}: no number of heads is divided like that"
                )

    @property
    def is_plain(self) -> bool:
        """Whether all layers have KV of one shape and V is as wide as K, so that the tensor has six dimensions."""
        return len(self.groups) == 1 and self.value_size in (None, self.head_dim)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups that have bytes in blocks, in their order in a block."""
        value_size = self.head_dim if self.value_size is None else self.value_size
        first = KVGroup(
            self.num_layers, self.num_kv_heads, self.head_dim, value_size, self.dtype, num_replicas=self.num_replicas
        )
        return (first, *(group for group in self.further_groups if not group.bytes_per_request))

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups' places in a block."""
        runs: list[BlockGroup] = []
        offset_bytes = 0
        for group in self.groups:
            total_num_kv_heads = group.num_kv_heads * self.tp_size // group.num_replicas
            run = BlockGroup(
                offset_bytes,
                group.num_layers,
                group.key_size,
                group.value_size,
                total_num_kv_heads,
                rank_kv_heads(total_num_kv_heads, self.tp_size, self.tp_rank),
                self.block_size * group.key_size * self.dtype_size_bytes,
                self.block_size * group.value_size * self.dtype_size_bytes,
            )
            runs.append(run)
            offset_bytes += run.size_bytes
        return tuple(runs)

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block, all layers and heads of this rank."""
        return self.block_size * self.slot_size_bytes

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers and heads of this rank."""
        numbers = sum(
            group.num_kv_heads * group.num_layers * (group.key_size + group.value_size) for group in self.groups
        )
        return numbers * self.dtype_size_bytes

    @property
    def total_token_size_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers and heads of all ranks, each head once."""
        numbers = sum(
            group.total_num_kv_heads * group.num_layers * (group.key_size + group.value_size)
            for group in self.block_groups
        )
        return numbers * self.dtype_size_bytes

    @property
    def state_size_bytes(self) -> int:
        """Bytes of one request's state on this rank, which does not grow with the request's tokens."""
        return sum(group.bytes_per_request for group in self.further_groups)

    @property
    def num_state_blocks(self) -> int:
        """How many blocks the state of one request takes, beside those of its tokens."""
        return -(-self.state_size_bytes // self.block_size_bytes)

    @property
    def max_num_tokens(self) -> int:
        """How many tokens the longest request can have: it needs blocks for its state too."""
        return max(0, self.num_blocks - self.num_state_blocks) * self.block_size

    @property
    def token_size_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers of one head. Of a plain layout only."""
        assert self.is_plain, "the heads of different groups differ in size"
        return self.num_layers * 2 * self.head_dim * self.dtype_size_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's KV cache tensor."""
        if not self.is_plain:
            return (self.num_blocks, self.block_size_bytes // self.dtype_size_bytes)
        return (self.num_blocks, self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def total_num_kv_heads(self) -> int:
        """The number of the model's KV heads in the first group, over all ranks."""
        return self.num_kv_heads * self.tp_size // self.num_replicas

    @property
    def total_kv_heads_of_groups(self) -> tuple[int, ...]:
        """The number of the model's KV heads in each group, over all ranks."""
        return tuple(group.num_kv_heads * self.tp_size // group.num_replicas for group in self.groups)

    @property
    def content_key(self) -> str:
        """A digest of what a block's bytes mean, 32 hex digits: with equal ones, equal hashes mean equal bytes."""
        heads = self.kv_heads
        parts = (self.model_fingerprint, self.dtype, self.total_num_kv_heads, heads.start, heads.stop)
        shape = (self.num_layers, self.block_size, self.head_dim, str(self.key_order), self.further_groups)
        meaning: tuple[object, ...] = (parts, shape)
        if not self.is_plain:
            # Ranks that hold the same heads of the first group may hold different heads of another one.
            meaning = (*meaning, self.value_size, self.block_groups)
        return hashlib.blake2b(repr(meaning).encode(), digest_size=16).hexdigest()

    @property
    def kv_heads(self) -> range:
        """The range of the model's KV heads that this rank holds, in the first group."""
        return rank_kv_heads(self.total_num_kv_heads, self.tp_size, self.tp_rank)


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """A part of a transfer: one producer rank sends these of the model's KV heads to one consumer rank."""

    producer_rank: int
    consumer_rank: int
    kv_heads: range


def rank_kv_heads(total_num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the KV heads that a rank holds: an equal share, or one head that the rank shares with its replicas.

    Raises ValueError if neither of total_num_kv_heads and tp_size divides the other.
    """
    if total_num_kv_heads % tp_size == 0:
        share = total_num_kv_heads // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % total_num_kv_heads == 0:
        head = tp_rank // (tp_size // total_num_kv_heads)
        return range(head, head + 1)
    raise ValueError(
        f"{total_num_kv_heads} KV heads cannot be shared by {tp_size} ranks: one number must divide the other"
    )


def plan_transfer(total_num_kv_heads: int, producer_tp_size: int, consumer_tp_size: int) -> tuple[HeadRoute, ...]:
    """Return which producer rank sends which heads to which consumer rank, by consumer rank and then by head.

    Every consumer rank gets each of its heads exactly once. If several producer ranks hold the same head, the consumer
    ranks that need it get it from different ones, as far as there are enough.
    Raises ValueError if the heads cannot be divided among either side's ranks.
    """
    producer_replicas = max(1, producer_tp_size // total_num_kv_heads)
    consumer_replicas = max(1, consumer_tp_size // total_num_kv_heads)
    holders = {
        heads: rank
        for rank in range(0, producer_tp_size, producer_replicas)
        for heads in [rank_kv_heads(total_num_kv_heads, producer_tp_size, rank)]
    }
    routes = []
    for consumer_rank in range(consumer_tp_size):
        wanted = rank_kv_heads(total_num_kv_heads, consumer_tp_size, consumer_rank)
        replica = consumer_rank % consumer_replicas * producer_replicas // consumer_replicas
        for held, first_rank in holders.items():
            shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if shared:
                routes.append(HeadRoute(first_rank + replica, consumer_rank, shared))
    return tuple(routes)


def plan_pairs(
    total_kv_heads_of_groups: Sequence[int], producer_tp_size: int, consumer_tp_size: int
) -> tuple[tuple[int, int], ...]:
    """Return the pairs (producer rank, consumer rank) that a transfer has a part for, by consumer rank.

    A pair has a part if plan_transfer() gives it heads of any group.
    """
    pairs = {
        (route.consumer_rank, route.producer_rank)
        for total in total_kv_heads_of_groups
        for route in plan_transfer(total, producer_tp_size, consumer_tp_size)
    }
    return tuple((producer, consumer) for consumer, producer in sorted(pairs))


def piece_size(block_size: int, other_block_size: int) -> int:
    """Return the tokens of a piece: the smaller block size. Raises ValueError unless it divides the other one."""
    small, large = sorted((block_size, other_block_size))
    if large % small:
        raise ValueError(f"block sizes {block_size} and {other_block_size}: one must be a multiple of the other")
    return small


def piece_ids(block_ids: Sequence[int], pieces_per_block: int) -> tuple[int, ...]:
    """Return the pieces of these blocks, in order."""
    if pieces_per_block == 1:
        return tuple(block_ids)
    return tuple(block_id * pieces_per_block + index for block_id in block_ids for index in range(pieces_per_block))


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Runs of bytes of equal size in a rank's cache, in the order in which they travel.

    starts: [n] int64, byte offsets in the cache; multiples of size_bytes if a block is cut into pieces
    """

    starts: np.ndarray
    size_bytes: int


def piece_runs(layout: KVCacheLayout, kv_heads: range, piece_tokens: int, pieces: Sequence[int]) -> ByteRuns:
    """Return where pieces are in a rank's cache, for some of the model's KV heads, all of which the rank holds.

    layout: a plain one; pieces: as piece_ids() returns them
    Returns len(pieces) runs if a block is one piece, otherwise one run for each piece, head, layer, and key or value:
    fewer are not possible, because a block keeps the tokens of one head and layer together.
    """
    ids = np.asarray(pieces, dtype=np.int64)
    first_head = kv_heads.start - layout.kv_heads.start
    head_size_bytes = layout.block_size * layout.token_size_bytes
    if piece_tokens == layout.block_size:
        return ByteRuns(ids * layout.block_size_bytes + first_head * head_size_bytes, len(kv_heads) * head_size_bytes)
    pieces_per_block = layout.block_size // piece_tokens
    run_size_bytes = piece_tokens * layout.head_dim * layout.dtype_size_bytes
    block_starts = ids // pieces_per_block * layout.block_size_bytes
    # The distance is the same from one head, layer, key or value to the next, so one arange() covers all of them.
    tile_starts = np.arange(len(kv_heads) * layout.num_layers * 2) * (pieces_per_block * run_size_bytes)
    in_tile = ids % pieces_per_block * run_size_bytes
    starts = (block_starts + in_tile)[:, None] + tile_starts + first_head * head_size_bytes
    return ByteRuns(starts.reshape(-1), run_size_bytes)
