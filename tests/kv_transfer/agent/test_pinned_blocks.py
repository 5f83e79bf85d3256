"""The table of who holds how many blocks, and since when."""

from __future__ import annotations

from kv_transfer.agent.pinned_blocks import PinnedBlocks


def test_blocks_are_pinned_from_begin_to_end() -> None:
    pins = PinnedBlocks()
    assert (pins.num_blocks, pins.oldest_s) == (0, None)
    pins.begin("a", 5.0)
    pins.begin("b", 6.0)
    pins.begin("a", 7.0)
    pins.hold("a", 3)
    pins.hold("b", 2)
    pins.hold("a", 4)
    assert (pins.num_blocks, pins.oldest_s) == (6, 5.0)
    pins.end("a")
    assert (pins.num_blocks, pins.oldest_s) == (2, 6.0)
    pins.end("b")
    assert (pins.num_blocks, pins.oldest_s) == (0, None)


def test_what_has_not_begun_or_has_ended_holds_nothing() -> None:
    pins = PinnedBlocks()
    pins.hold("a", 3)
    pins.end("a")
    assert (pins.num_blocks, pins.oldest_s) == (0, None)
