"""The figures on transfers and links that an operator sees."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import LinkState
from tests.kv_transfer.connected_workers import LAYOUT, Pair, connected_pair

SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected_pair("loopback") as connected:
        yield connected


def test_pinned_blocks_are_counted_at_both_ends_until_the_transfer_is_over(pair: Pair) -> None:
    before_s = time.time()
    pair.begin("a", TARGET, NUM_TOKENS, num_local_blocks=1)
    pair.producer.compute("a", SOURCE, 0, 8)
    # Events are taken in order: when this one's READY is in, so is the progress.
    pair.begin("b", (12,), 4)
    producer = pair.producer.stats()
    consumer = pair.consumer.wait_stats(lambda stats: stats.num_pinned_blocks == 5)
    assert producer.num_pinned_blocks == 4, "b has none yet"
    for stats in (producer, consumer):
        assert stats.oldest_pin_at_s is not None
        assert before_s - 0.1 <= stats.oldest_pin_at_s <= time.time() + 0.1
    for name in "ab":
        pair.producer.finish(name, ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending(name)
        pair.consumer.wait_received(name)
    for stats in (pair.producer.stats(), pair.consumer.stats()):
        assert (stats.num_pinned_blocks, stats.oldest_pin_at_s) == (0, None)


def test_a_link_shows_its_peer_what_it_carried_and_when(pair: Pair) -> None:
    before_s = time.time() - 0.1
    pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
    for node, peer, role in (
        (pair.producer, "decode-0", TransferRole.PRODUCER),
        (pair.consumer, "prefill-0", TransferRole.CONSUMER),
    ):
        (link,) = node.stats().links
        assert (link.peer_engine_id, link.peer_incarnation, link.role, link.state) == (peer, 1, role, LinkState.OPEN)
        assert (link.num_active_transfers, link.num_bytes) == (0, 4 * LAYOUT.block_size_bytes)
        assert before_s <= link.opened_at_s <= link.last_active_at_s <= time.time() + 0.1
        assert link.last_error == ""


def test_a_lost_link_is_shown_until_another_takes_its_place_which_shows_why(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    assert pair.consumer.stats().links[0].num_active_transfers == 1
    pair.producer.abort_links()
    reason = pair.consumer.wait_received("a").reason
    pair.producer.wait_failed_sending("a")
    pair.producer.finish("a", ProducerEnd.ABORTED)
    pair.producer.wait_finished_sending("a")
    for node in (pair.producer, pair.consumer):
        stats = node.wait_stats(lambda stats: stats.num_links == 0)
        (link,) = stats.links
        assert (link.state, link.num_active_transfers) == (LinkState.DEAD, 0)
        assert link.last_error
        assert stats.num_links_lost == 1
    assert pair.consumer.stats().links[0].last_error in reason
    assert pair.hand_over("b", SOURCE, TARGET, NUM_TOKENS).outcome is LoadOutcome.LOADED
    (link,) = pair.consumer.stats().links
    assert (link.state, link.last_error in reason) == (LinkState.OPEN, True)


def test_times_of_loads_add_up(pair: Pair) -> None:
    received = [pair.hand_over(name, SOURCE, TARGET, NUM_TOKENS) for name in "ab"]
    pair.begin("aborted", TARGET, NUM_TOKENS)
    pair.producer.finish("aborted", ProducerEnd.ABORTED)
    pair.consumer.wait_received("aborted")
    stats = pair.consumer.stats()
    timings = [one.timings for one in received if one.timings is not None]
    assert stats.num_timed_transfers == len(timings) == 2
    assert stats.transfer_s == pytest.approx(sum(timing.transfer_s for timing in timings))
    assert stats.exposed_s == pytest.approx(sum(timing.exposed_s for timing in timings))
    assert pair.producer.stats().num_timed_transfers == 0


def test_a_transfer_of_a_later_attempt_is_a_retry(pair: Pair) -> None:
    pair.producer.produce("a", pair.consumer.address, NUM_TOKENS, attempt=1)
    pair.producer.produce("b", pair.consumer.address, NUM_TOKENS)
    pair.begin("c", TARGET, NUM_TOKENS)
    assert (pair.producer.stats().num_retries, pair.consumer.stats().num_retries) == (1, 0)
