"""Tests of cluster/routing/prefixes/engine_blocks.py and cluster/routing/prefixes/prefix_indexes.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.core.blocks.block_pool import BlockPool, KVCacheBlock
from actors.core.blocks.kv_events import KVEventLog
from actors.core.requests.block_hash import BlockHash
from actors.sessions.block_messages import (
    CachedBlocks,
    KVEvents,
    event_messages,
    snapshot_message,
)
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole
from cluster.routing.prefixes.engine_blocks import ASK_INTERVAL_S, BlockReportCounts, EngineBlocks
from cluster.routing.prefixes.prefix_index import PrefixIndex
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from tests.cluster.routing.prefixes.test_prefix_index import HASHES, Clock, hashes_of

ENGINE: EngineKey = ("decode-0", 1)
OTHER: EngineKey = ("decode-1", 1)
BLOCK_SIZE = 16


class Following:
    """An index that follows one engine with 100 blocks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.index = PrefixIndex(2**20, self.clock)
        self.counts = BlockReportCounts()
        self.blocks = EngineBlocks(ENGINE, self.index, BLOCK_SIZE, self.counts, self.clock)

    def is_asked(self, num_blocks: int = 100, block_size: int = BLOCK_SIZE) -> bool:
        return self.blocks.on_size(num_blocks, block_size)

    def take_snapshot(self, hashes: Sequence[BlockHash], sequence: int = 0) -> None:
        assert self.is_asked()
        self.blocks.take(part(hashes, sequence, 0, 100, 100))


def key_bytes(hashes: Sequence[BlockHash]) -> bytes:
    return b"".join(block_hash[:8] for block_hash in hashes)


def position_bytes(first: int, num_blocks: int) -> bytes:
    return b"".join((first + number).to_bytes(4, "little") for number in range(num_blocks))


def part(
    hashes: Sequence[BlockHash], sequence: int, begin: int, end: int, num_ids: int, first: int = 0
) -> CachedBlocks:
    return CachedBlocks(sequence, begin, end, num_ids, key_bytes(hashes), position_bytes(first, len(hashes)))


def stored(sequence: int, hashes: Sequence[BlockHash], first_block: int = 0) -> KVEvents:
    return KVEvents(sequence, 1, b"", key_bytes(hashes), position_bytes(first_block, len(hashes)))


def removed(sequence: int, hashes: Sequence[BlockHash]) -> KVEvents:
    return KVEvents(sequence, 1, key_bytes(hashes))


def test_a_snapshot_is_asked_for_once_the_engines_size_is_known_and_its_blocks_have_the_same_size() -> None:
    following = Following()
    assert not following.is_asked(num_blocks=0, block_size=0)
    assert following.is_asked()
    assert not following.is_asked()
    assert not Following().is_asked(block_size=32), "its hashes would be those of other blocks"


def test_events_after_a_snapshot_correct_what_was_sent_there() -> None:
    following = Following()
    following.index.add([ENGINE, OTHER], HASHES)
    following.take_snapshot(HASHES[:3], sequence=7)
    assert following.index.find(HASHES) == {ENGINE: 3, OTHER: 10}
    following.blocks.take(stored(7, HASHES[3:6], 3))
    following.blocks.take(removed(8, HASHES[5:]))
    assert following.index.find(HASHES) == {ENGINE: 5, OTHER: 10}
    assert following.counts == BlockReportCounts(num_events=2, num_gaps=0, num_snapshots=1)


def test_events_before_a_snapshot_and_snapshots_that_nobody_asked_for_are_ignored() -> None:
    following = Following()
    following.blocks.take(stored(0, HASHES))
    following.blocks.take(part(HASHES, 0, 0, 100, 100))
    assert following.index.find(HASHES) == {}
    assert following.counts == BlockReportCounts()


def test_a_gap_is_seen_and_repaired_by_a_snapshot_which_is_asked_for_at_intervals() -> None:
    following = Following()
    following.take_snapshot(HASHES[:3])
    following.blocks.take(stored(2, HASHES[3:6], 3))
    assert following.counts.num_gaps == 1
    assert not following.is_asked(), "one was asked for just now"
    following.blocks.take(stored(3, HASHES[6:8], 6))
    assert following.index.find(HASHES) == {ENGINE: 3}
    following.clock.now_s = ASK_INTERVAL_S
    following.take_snapshot(HASHES[:9], sequence=4)
    assert following.index.find(HASHES) == {ENGINE: 9}
    following.blocks.take(removed(4, HASHES[1:]))
    assert following.index.find(HASHES) == {ENGINE: 1}
    assert following.counts == BlockReportCounts(num_events=1, num_gaps=1, num_snapshots=2)


def test_a_snapshot_with_a_part_missing_is_given_up() -> None:
    following = Following()
    following.take_snapshot(HASHES[:2])
    following.clock.now_s = ASK_INTERVAL_S
    following.blocks.take(stored(5, []))
    assert following.is_asked()
    following.blocks.take(part(HASHES[:3], 6, 0, 30, 100))
    following.blocks.take(part(HASHES[6:9], 6, 60, 100, 100, 6))
    assert following.index.find(HASHES) == {ENGINE: 2}
    following.clock.now_s = 2 * ASK_INTERVAL_S
    assert following.is_asked()


def test_a_cleared_cache_begins_with_a_snapshot() -> None:
    following = Following()
    following.take_snapshot(HASHES[:2])
    following.blocks.take(KVEvents(0, 2, b"", key_bytes(HASHES[:1]), position_bytes(0, 1), is_cleared=True))
    following.clock.now_s = ASK_INTERVAL_S
    following.take_snapshot(HASHES[:1], sequence=2)
    assert following.index.find(HASHES) == {ENGINE: 1}
    assert following.counts.num_gaps == 0


def test_an_engine_that_claims_more_than_it_has_spoils_nothing_of_others() -> None:
    following = Following()
    following.index.note_engine(OTHER, 20_000)
    prompts = [hashes_of(number, 100) for number in range(100)]
    for prompt in prompts:
        following.index.add([OTHER], prompt)
    known = following.index.find(prompts[0])
    following.take_snapshot([])
    for sequence in range(100):
        following.blocks.take(stored(sequence, hashes_of(1000 + sequence, 1000)))
    assert following.counts.num_gaps == 1
    assert following.counts.num_events < 10
    assert following.index.find(prompts[0]) == known
    assert known[OTHER] == 100


def test_a_snapshot_is_asked_for_again_when_the_index_keeps_more_blocks_of_a_prefix() -> None:
    following = Following()
    others = [("decode-8", 1), ("decode-9", 1)]
    for other in others:
        following.index.note_engine(other, 10_000)
    assert following.index.stride == 4
    following.take_snapshot(HASHES)
    assert following.index.find(HASHES) == {ENGINE: 8}
    following.clock.now_s += ASK_INTERVAL_S
    assert not following.is_asked()
    for other in others:
        following.index.forget_engine(other)
    assert following.index.stride == 1
    following.take_snapshot(HASHES)
    assert following.index.find(HASHES) == {ENGINE: 10}
    following.clock.now_s += ASK_INTERVAL_S
    assert not following.is_asked()
    assert following.counts.num_gaps == 0


class Engine:
    """An engine's cache of 30 blocks, and its reports to a follower."""

    def __init__(self) -> None:
        self.log, self.following = KVEventLog(), Following()
        self.pool = BlockPool(30, self.log)
        self.held: list[KVCacheBlock] = []
        self.next_part: int | None = None
        self.has_missed = False

    def run(self, prompt: list[BlockHash]) -> None:
        """End the request that runs, and compute a prompt."""
        self.pool.free(self.held)
        hit = self.pool.find_longest_prefix(prompt, 8)
        self.pool.touch(hit)
        self.held = [*hit, *self.pool.get_free_blocks(8 - len(hit))]
        self.pool.cache_full_blocks(self.held[len(hit) :], prompt[len(hit) :], len(hit))

    def pass_time(self, seconds: float) -> None:
        self.following.clock.now_s += seconds
        if self.following.is_asked(num_blocks=30):
            self.next_part = 0

    def report(self, *, is_lost: bool = False) -> None:
        batch = self.log.take()
        if is_lost:
            self.has_missed |= batch is not None
            return
        messages = [] if batch is None else event_messages(batch)
        if self.has_missed and not messages:
            messages = [KVEvents(2**62, 0)]  # A session server says so where nothing else shows what it has dropped.
        self.has_missed = False
        for message in messages:
            self.following.blocks.take(message)

    def send_part(self) -> None:
        if self.next_part is not None:
            begin, end = self.next_part, self.next_part + 10
            self.report()
            blocks = self.pool.cached_blocks(begin, end)
            self.following.blocks.take(snapshot_message(self.log.sequence, begin, 30, blocks, end))
            self.next_part = None if end == 30 else end


@given(st.lists(st.integers(0, 9), max_size=60))
@example([6, 6, 6, 0, 8])
@settings(max_examples=50, deadline=None)
def test_the_index_knows_what_the_cache_has_whatever_is_lost_on_the_way(steps: list[int]) -> None:
    engine, prompts = Engine(), [hashes_of(number, 8) for number in range(6)]
    for step in steps:
        engine.pass_time(ASK_INTERVAL_S / 3)
        if step < 6:
            engine.run(prompts[step])
        elif step == 6:
            engine.send_part()
        elif step == 7:
            engine.pool.reset()
        else:
            engine.report(is_lost=step == 8)
    engine.run(hashes_of(6, 8))  # The loss of the newest events shows when the next ones come.
    for _ in range(12):
        engine.pass_time(ASK_INTERVAL_S)
        engine.send_part()
        engine.report()
    cached = [len(engine.pool.find_longest_prefix(prompt, 8)) for prompt in prompts]
    assert [engine.following.index.find(prompt).get(ENGINE, 0) for prompt in prompts] == cached


def test_each_version_of_the_model_has_its_index() -> None:
    indexes = PrefixIndexes(2**20)
    one = indexes.make(1, BLOCK_SIZE)
    assert indexes.make(1, BLOCK_SIZE) is one
    assert indexes.make(1, 32) is not one
    assert indexes.make(2, 32) is not indexes.make(1, 32)
    indexes.keep({2})
    assert set(indexes.sizes()) == {2}


@pytest.mark.parametrize(("version", "is_followed"), [(1, True), (2, False)])
def test_engines_are_followed_whose_version_a_router_knows(version: int, is_followed: bool) -> None:
    indexes = PrefixIndexes(2**20)
    index = indexes.make(1, BLOCK_SIZE)
    engine = EngineDescriptor(*ENGINE, EngineRole.DECODE, "h:1", model_version=version)
    blocks = indexes.follow(engine)
    assert (blocks is not None) == is_followed
    if blocks is not None:
        assert blocks.on_size(100, BLOCK_SIZE)
        blocks.take(part(HASHES, 0, 0, 100, 100))
        assert index.find(HASHES) == {ENGINE: 10}
        [(size, counts)] = indexes.sizes().values()
        assert (size.num_blocks, counts.num_snapshots) == (10, 1)
        indexes.forget_engine(ENGINE)
        assert index.find(HASHES) == {}
