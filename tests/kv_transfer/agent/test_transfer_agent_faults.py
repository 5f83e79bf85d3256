"""Agents beside a peer that stalls, that names another incarnation, or that is not like them.

Tests of kv_transfer/agent/transfer_reports.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace

import msgspec
import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Cancel, Finished, Hello, Ready, decode
from kv_transfer.layout import KeyOrder, KVCacheLayout
from kv_transfer.links import link_table as links
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from tests.kv_transfer.connected_workers import LAYOUT, Node, Pair, connected_pair
from tests.kv_transfer.faulty_transport import Faults

SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14
IMPATIENT_S = 0.3
PATIENT_S = 60.0


class Barrier:
    """Threads that come to it wait until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._has_come = threading.Event()

    def wait(self) -> None:
        self._has_come.set()
        assert self._opened.wait(PATIENT_S), "the test opens it"

    def wait_reached(self) -> None:
        """Wait until a thread is at it. The other end of a link does so before the time of its chunk begins to run."""
        assert self._has_come.wait(PATIENT_S), "somebody comes"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def barrier() -> Iterator[Barrier]:
    barrier = Barrier()
    yield barrier
    barrier.open()


# -- stalls ----------------------------------------------------------------------------------------------------------


def test_a_producer_that_announces_and_does_not_send_loses_its_link_and_writes_nothing_later(
    barrier: Barrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(before_send=barrier.wait, before_receive=barrier.wait_reached).install(monkeypatch)
    with connected_pair("loopback") as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.consumer.grow_impatient(IMPATIENT_S)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 0)
        assert received.reason == "link with prefill-0 lost: the peer did not move a chunk within 0.3 s"
        assert "a" not in pair.producer.output.finished_sending, "its thread may still read the blocks"
        barrier.open()
        pair.producer.wait_finished_sending("a")
        assert not pair.consumer.cache.any()
        check_that_all_is_well(pair, num_stalls=(0, 1))


def test_a_consumer_that_does_not_receive_costs_the_producer_only_the_link(
    barrier: Barrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(before_receive=barrier.wait, before_send=barrier.wait_reached).install(monkeypatch)
    with connected_pair("loopback") as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.producer.grow_impatient(IMPATIENT_S)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        assert "the peer did not move a chunk within 0.3 s" in pair.producer.wait_failed_sending("a")
        pair.producer.finish("a", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("a")
        assert "a" not in pair.consumer.output.finished_recving, "its thread may still write the blocks"
        barrier.open()
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 0)
        assert not pair.consumer.cache.any()
        check_that_all_is_well(pair, num_stalls=(1, 0))


def test_a_stall_in_the_middle_leaves_the_chunks_before_it(barrier: Barrier, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, awaited, arrived = itertools.count(), itertools.count(), itertools.count()
    faults = Faults(
        before_send=lambda: barrier.wait() if next(sent) == 2 else None,
        before_receive=lambda: barrier.wait_reached() if next(awaited) == 2 else None,
    )
    faults.install(monkeypatch)
    with connected_pair("loopback", KVTransferConfig(max_chunk_bytes=1)) as pair:
        faults.after_receive = lambda blocks: pair.consumer.grow_impatient(IMPATIENT_S) if next(arrived) == 1 else None
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
        barrier.open()
        pair.producer.wait_finished_sending("a")
        assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE[:2], TARGET[:2]))
        check_that_all_is_well(pair, num_stalls=(0, 1))


def check_that_all_is_well(pair: Pair, *, num_stalls: tuple[int, int]) -> None:
    """The link is made anew, and nothing is held. num_stalls: at the producer, at the consumer."""
    assert pair.hand_over("next", SOURCE, range(12, 16), NUM_TOKENS).outcome is LoadOutcome.LOADED
    for node, stalls in zip((pair.producer, pair.consumer), num_stalls, strict=True):
        stats = node.stats()
        assert (stats.num_stalls, stats.num_links_lost, stats.num_links) == (stalls, 1, 1)
        assert (stats.num_active_transfers, stats.num_pinned_blocks) == (0, 0)


# -- other incarnations and attempts ---------------------------------------------------------------------------------


def test_a_consumer_that_was_started_again_is_served_and_its_former_incarnation_is_not() -> None:
    hub = LoopbackHub()
    prefill, old = EngineAddress("prefill-0", 1, "prefill-0"), EngineAddress("decode-0", 1, "decode-0")
    new = replace(old, incarnation=2)
    producer, before = (Node(KVTransferConfig(), end, LAYOUT, hub.control(end)) for end in (prefill, old))
    before.reserve("a", prefill, TARGET, NUM_TOKENS)
    producer.wait_stats(lambda stats: stats.num_links == 1)
    after = Node(KVTransferConfig(), new, LAYOUT, hub.control(new))
    try:
        producer.produce("a", new, NUM_TOKENS)
        received = before.wait_received("a")
        assert (received.outcome, received.reason) == (LoadOutcome.FAILED, "the producer does not have the request")
        assert "a" not in producer.output.ready_to_prefill
        assert Pair(producer, after).hand_over("b", SOURCE, TARGET, NUM_TOKENS).outcome is LoadOutcome.LOADED
        assert producer.stats().dropped_messages == {"another incarnation or attempt": 1}
    finally:
        for node in (producer, before, after):
            node.worker.shutdown()


def test_what_an_earlier_attempt_says_is_dropped_at_both_ends() -> None:
    with connected_pair("loopback") as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        (upward,) = pair.consumer.streams()
        (downward,) = pair.producer.streams()
        upward.send(Ready("t-a", -1, 0, NUM_TOKENS))
        upward.send(Cancel("t-a", -1))
        downward.send(Finished("t-a", -1, ProducerEnd.ABORTED, 0, None, "long ago"))
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
        pair.producer.wait_finished_sending("a")
        assert pair.producer.stats().dropped_messages == {"another attempt": 2}
        assert pair.consumer.stats().dropped_messages == {"unknown transfer": 1}


# -- unlike ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consumer_layout", "says"),
    [
        (replace(LAYOUT, model_fingerprint="b"), "model: 'b' at the consumer, 'model-a' at the producer"),
        (replace(LAYOUT, dtype="float16"), "dtype: 'float16' at the consumer, 'float32' at the producer"),
        (replace(LAYOUT, block_size=6), "block_size, not a multiple: 6 at the consumer, 4 at the producer"),
        (replace(LAYOUT, num_layers=3), "num_layers: 3 at the consumer, 2 at the producer"),
        (replace(LAYOUT, num_kv_heads=1), "num_kv_heads of all ranks: 1 at the consumer, 2 at the producer"),
        (replace(LAYOUT, head_dim=4), "head_dim: 4 at the consumer, 8 at the producer"),
        (
            replace(LAYOUT, key_order=KeyOrder.TRANSPOSED),
            "order of keys: 'transposed' at the consumer, 'plain' at the producer",
        ),
    ],
    ids=["model", "dtype", "block size", "layers", "heads", "head_dim", "order of keys"],
)
def test_an_unlike_layout_is_refused_with_both_values(consumer_layout: KVCacheLayout, says: str) -> None:
    with connected_pair("loopback", consumer_layout=consumer_layout) as pair:
        check_that_it_is_refused(pair, says)


def test_another_protocol_version_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PROTOCOL_VERSION", 99)
    with connected_pair("loopback") as pair:
        check_that_it_is_refused(pair, f"protocol version: 99 at the consumer, {PROTOCOL_VERSION} at the producer")


def test_checksums_at_one_end_only_are_refused_with_both_values() -> None:
    with connected_pair("loopback", consumer_config=KVTransferConfig(checksum=True)) as pair:
        check_that_it_is_refused(pair, "checksum: True at the consumer, False at the producer")


def check_that_it_is_refused(pair: Pair, says: str) -> None:
    pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 0)
    assert received.reason == f"link with prefill-0 lost: refused: {says}"
    assert pair.producer.stats().num_links == pair.consumer.stats().num_links == 0
    (lost,) = pair.consumer.stats().links
    assert lost.last_error == f"refused: {says}"


def test_the_first_word_of_an_earlier_version_can_be_read_to_be_refused() -> None:
    hello = Hello(1, "decode-0", 5, "prefill-0", 3, "tcp", LAYOUT)
    fields = {"type": "hello", **msgspec.structs.asdict(hello)}
    fields["layout"] = layout = asdict(LAYOUT)
    del fields["checksum"], fields["is_on_gpu"], layout["key_order"], layout["further_groups"]
    assert decode(msgspec.msgpack.encode(fields)) == hello
