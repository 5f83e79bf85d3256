"""The order of chunks on a link, and how many are announced ahead."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.chunk_queue import ChunkQueue, QueuedChunk

FULL = 100


def chunk(transfer_id: str, first_block: int = 0, size_bytes: int = FULL) -> QueuedChunk:
    return QueuedChunk(transfer_id, first_block, (7,), size_bytes)


def announce_all(queue: ChunkQueue) -> list[str]:
    """One chunk leaves whenever the window is full."""
    names = []
    while (taken := queue.take()) is not None:
        names.append(str(taken.transfer_id))
        queue.on_sent()
    return names


def test_transfers_take_turns() -> None:
    queue = ChunkQueue(FULL)
    for name in "aaabbc":
        queue.put(chunk(name))
    assert announce_all(queue) == list("abcaba")
    assert queue.take() is None


def test_a_newcomer_waits_for_one_chunk_of_each_other_transfer() -> None:
    queue = ChunkQueue(FULL)
    for first_block in range(50):
        queue.put(chunk("long", first_block))
    assert [queue.take(), queue.take(), queue.take()] == [chunk("long", 0), chunk("long", 1), None]
    queue.put(chunk("short"))
    queue.on_sent()
    assert queue.take() == chunk("long", 2)
    queue.on_sent()
    assert queue.take() == chunk("short")


def test_two_chunks_are_ahead_whatever_their_size() -> None:
    queue = ChunkQueue(FULL)
    for _ in range(3):
        queue.put(chunk("a", size_bytes=10 * FULL))
    assert queue.take() is not None
    assert queue.take() is not None
    assert queue.take() is None


def test_small_chunks_are_ahead_up_to_two_full_ones() -> None:
    queue = ChunkQueue(FULL)
    for _ in range(9):
        queue.put(chunk("a", size_bytes=FULL // 4))
    assert sum(queue.take() is not None for _ in range(9)) == 8
    queue.on_sent()
    assert queue.take() is not None


def test_a_dropped_transfer_has_no_turn_and_what_it_announced_still_counts() -> None:
    queue = ChunkQueue(FULL)
    for name in "aabb":
        queue.put(chunk(name))
    assert queue.take() == chunk("a")
    assert queue.drop("a") == chunk("a").size_bytes
    assert queue.take() == chunk("b")
    assert queue.take() is None, "two are on their way"
    queue.on_sent()
    assert queue.take() == chunk("b")
    assert queue.drop("unknown") == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3 * FULL)), max_size=40))
def test_every_chunk_comes_once_in_its_transfers_order_and_nobody_waits_for_two_turns_of_another(
    puts: list[tuple[str, int]],
) -> None:
    queue = ChunkQueue(FULL)
    for first_block, (name, size_bytes) in enumerate(puts):
        queue.put(chunk(name, first_block, size_bytes))
    taken: list[QueuedChunk] = []
    while (next_chunk := queue.take()) is not None:
        taken.append(next_chunk)
        queue.on_sent()
    for name in "abcd":
        own = [index for index, (other, _) in enumerate(puts) if other == name]
        assert [c.first_block for c in taken if c.transfer_id == name] == own
        positions = [index for index, c in enumerate(taken) if c.transfer_id == name]
        assert all(after - before <= 4 for before, after in itertools.pairwise(positions))
