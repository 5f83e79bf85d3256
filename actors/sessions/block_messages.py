"""Defines the messages by which an engine tells an ingress of the blocks in its prefix cache.

An ingress asks with WatchBlocks. The engine answers with a snapshot, a CachedBlocks message for each range of block
ids, and from then on sends KVEvents as well. Every message has the number of the next event, so a receiver that takes
the messages in order knows what is cached, and sees when one is missing. Of each hash the first 8 bytes are sent, and
no tokens. An engine that does not record events does not answer.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from actors.core.requests.block_hash import BlockHash
from kv_transfer.message_ranges import Count, Total

MAX_MESSAGE_BLOCKS: Final = 4096
"""The most blocks of one message, which a receiver takes in within a few milliseconds."""
_KEY_BYTES: Final = 8
_POSITION_BYTES: Final = 4

BlockKeyBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=_KEY_BYTES * MAX_MESSAGE_BLOCKS)]
"""The first 8 bytes of the hash of each block."""
PositionBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=_POSITION_BYTES * MAX_MESSAGE_BLOCKS)]


class WatchBlocks(msgspec.Struct, frozen=True, tag="watch_blocks"):
    """Asks an engine for a snapshot of its cached blocks, and for all later events."""


class KVEvents(msgspec.Struct, frozen=True, tag="kv_events"):
    """The effect of consecutive events of the prefix cache.

    sequence:   number of the first event
    num_events: number of the events; the next message begins with sequence + num_events
    is_cleared: whether all blocks left the cache, before what else the message says
    removed:    the blocks that left the cache
    stored:     the blocks that entered it; none of them is in removed
    positions:  the position of each stored block in its prefix, 4 bytes in little-endian order each
    """

    sequence: Total
    num_events: Count
    removed: BlockKeyBytes = b""
    stored: BlockKeyBytes = b""
    positions: PositionBytes = b""
    is_cleared: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        _count(self.removed)
        _check_positions(self.stored, self.positions)


class CachedBlocks(msgspec.Struct, frozen=True, tag="cached_blocks"):
    """The cached ones of the blocks with the ids begin to end - 1: a part of a snapshot.

    sequence:  number of the next event
    num_ids:   the engine's number of blocks; the snapshot is complete with end == num_ids
    positions: each block's position in its prefix, 4 bytes in little-endian order each
    """

    sequence: Total
    begin: Count
    end: Count
    num_ids: Count
    keys: BlockKeyBytes
    positions: PositionBytes

    def __post_init__(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        _check_positions(self.keys, self.positions)
        if not self.begin <= self.end <= self.num_ids:
            raise ValueError(f"a snapshot of blocks {self.begin} to {self.end} of {self.num_ids}")


def event_messages(batch: KVEventBatch) -> list[KVEvents]:
    """Return the messages for a batch of events, each for events with MAX_MESSAGE_BLOCKS blocks at most."""
    messages: list[KVEvents] = []
    events: list[KVCacheEvent] = []
    num_blocks, sequence = 0, batch.sequence
    for event in batch.events:
        num_blocks += len(event.block_hashes)
        if num_blocks > MAX_MESSAGE_BLOCKS:
            messages.append(_message(sequence, events))
            sequence += len(events)
            events, num_blocks = [], len(event.block_hashes)
        events.append(event)
    messages.append(_message(sequence, events))
    return messages


def snapshot_message(sequence: int, begin: int, num_ids: int, blocks: Sequence[KVCacheBlock], end: int) -> CachedBlocks:
    """Return a part of a snapshot. blocks: the cached ones of the blocks begin to end - 1"""
    keys = _keys(block.block_hash for block in blocks if block.block_hash is not None)
    return CachedBlocks(sequence, begin, end, num_ids, keys, _position_bytes([block.position for block in blocks]))


def _message(sequence: int, events: Sequence[KVCacheEvent]) -> KVEvents:
    """Put the blocks of all events together; the last event of a block counts."""
    position_of: dict[BlockHash, int | None] = {}
    is_cleared = False
    for event in events:
        match event:
            case BlockStored():
                position_of.update(zip(event.block_hashes, itertools.count(event.first_block)))
            case BlockRemoved():
                position_of.update(dict.fromkeys(event.block_hashes))
            case _:
                position_of.clear()
                is_cleared = True
    removed = _keys(block_hash for block_hash, position in position_of.items() if position is None)
    stored = {block_hash: position for block_hash, position in position_of.items() if position is not None}
    positions = _position_bytes(list(stored.values()))
    return KVEvents(sequence, len(events), removed, _keys(stored), positions, is_cleared)


def _position_bytes(positions: list[int]) -> bytes:
    return struct.pack(f"<{len(positions)}I", *positions)


def _check_positions(keys: bytes, positions: bytes) -> None:
    if len(positions) != _POSITION_BYTES * _count(keys):
        raise ValueError("the numbers of keys and positions differ")


def _keys(block_hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:_KEY_BYTES] for block_hash in block_hashes])


def _count(keys: bytes) -> int:
    if len(keys) % _KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole number of keys")
    return len(keys) // _KEY_BYTES
