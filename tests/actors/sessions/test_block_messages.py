from __future__ import annotations

import msgspec
import pytest

from actors.core.blocks.block_pool import BlockPool
from actors.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from actors.core.requests.block_hash import BlockHash
from actors.sessions.block_messages import (
    MAX_MESSAGE_BLOCKS,
    CachedBlocks,
    KVEvents,
    event_messages,
    snapshot_message,
)
from actors.sessions.session_messages import decode_engine_message, encode
from kv_transfer.message_ranges import MALFORMED


def name(number: int) -> BlockHash:
    return number.to_bytes(8, "little") + b"the rest"


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def position_bytes(*positions: int) -> bytes:
    return b"".join(position.to_bytes(4, "little") for position in positions)


def test_events_are_sent_with_eight_bytes_of_each_hash() -> None:
    batch = KVEventBatch(7, [BlockStored([name(1), name(2)], 5), BlockRemoved([name(3)])])
    [message] = event_messages(batch)
    expected = KVEvents(7, 2, removed=keys(3), stored=keys(1, 2), positions=position_bytes(5, 6))
    assert decode_engine_message(encode(message)) == message == expected


def test_the_last_event_of_a_block_counts() -> None:
    events: list[KVCacheEvent] = [
        BlockStored([name(1), name(2)], 0),
        BlockRemoved([name(2), name(3)]),
        BlockStored([name(3)], 4),
    ]
    [message] = event_messages(KVEventBatch(0, [*events]))
    assert message == KVEvents(0, 3, removed=keys(2), stored=keys(1, 3), positions=position_bytes(0, 4))
    [message] = event_messages(KVEventBatch(0, [*events, AllBlocksCleared(), BlockStored([name(4)], 0)]))
    assert message == KVEvents(0, 5, stored=keys(4), positions=position_bytes(0), is_cleared=True)


def test_many_events_are_cut_into_messages_that_a_receiver_takes_in() -> None:
    hashes = [name(number) for number in range(700)]
    batch = KVEventBatch(10, [BlockRemoved(hashes) for _ in range(13)])
    messages = event_messages(batch)
    assert [(message.sequence, message.num_events) for message in messages] == [(10, 5), (15, 5), (20, 3)]
    assert [decode_engine_message(encode(message)) for message in messages] == messages


def test_a_snapshot_has_the_cached_blocks_of_a_range_with_their_positions() -> None:
    pool = BlockPool(6)
    blocks = pool.get_free_blocks(4)
    pool.cache_full_blocks(blocks[1:4], [name(1), name(2), name(3)], 300)
    first = snapshot_message(9, 0, 6, pool.cached_blocks(0, 3), 3)
    second = snapshot_message(9, 3, 6, pool.cached_blocks(3, 6), 6)
    assert first == CachedBlocks(9, 0, 3, 6, keys(1, 2), position_bytes(300, 301))
    assert second == CachedBlocks(9, 3, 6, 6, keys(3), position_bytes(302))
    assert decode_engine_message(encode(first)) == first


def test_messages_that_contradict_themselves_or_are_too_large_are_refused() -> None:
    full = bytes(8 * MAX_MESSAGE_BLOCKS)
    events = {"type": "kv_events", "sequence": 0, "num_events": 1}
    blocks = {"type": "cached_blocks", "sequence": 0, "begin": 0, "end": 2, "num_ids": 2, "keys": b"", "positions": b""}
    for fitting in (events | {"removed": full}, blocks | {"keys": bytes(8), "positions": bytes(4)}):
        decode_engine_message(msgspec.msgpack.encode(fitting))
    for wrong in (
        events | {"sequence": -1},
        events | {"removed": b"1234567"},
        events | {"removed": full + bytes(8)},
        events | {"stored": bytes(8), "positions": bytes(8)},
        blocks | {"keys": bytes(8), "positions": bytes(8)},
        blocks | {"begin": 3},
        blocks | {"end": 3},
    ):
        with pytest.raises(MALFORMED):
            decode_engine_message(msgspec.msgpack.encode(wrong))
