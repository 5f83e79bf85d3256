"""Two transfer agents hand KV over for real, in one process: over loopback, and over gRPC and each CPU transport.

Tests of kv_transfer/links/loopback_control.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerProgress
from kv_transfer.layout import KVCacheLayout
from tests.kv_transfer.connected_workers import LAYOUT, Join, Pair, connected_pair

SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14
"""Four blocks of four; the last one is partial."""

JOINS: tuple[Join, ...] = ("loopback", "tcp", "shared memory")
NUM_IDLE_GRPC = 5
IDLE_S = 60.0
"""gRPC's own pool grows and shrinks as it likes, by a thread or two; it ends idle ones after a while."""

SMALL_CHUNKS = KVTransferConfig(max_chunk_bytes=1)
SHORT_READY = KVTransferConfig(ready_timeout_s=0.05)


@pytest.fixture(params=JOINS)
def join(request: pytest.FixtureRequest) -> Join:
    param: Join = request.param
    return param


@pytest.fixture
def pair(join: Join) -> Iterator[Pair]:
    with connected_pair(join) as connected:
        yield connected


def test_scattered_blocks_arrive_bit_for_bit_and_nothing_else_is_written(pair: Pair) -> None:
    received = pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
    assert (received.outcome, received.num_valid_tokens, received.first_token_id) == (LoadOutcome.LOADED, 14, 7)
    assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE, TARGET))
    assert received.timings is not None
    assert received.timings.num_blocks == 4
    assert received.timings.num_bytes == 4 * LAYOUT.block_size_bytes


def test_local_blocks_are_neither_sent_nor_written(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS, num_local_blocks=2)
    pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
    pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
    assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
    assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE[2:], TARGET[2:]))
    pair.producer.wait_finished_sending("a")
    assert pair.producer.stats().num_sent_blocks == 2


def test_chunks_leave_as_they_are_computed(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    for before, after in ((4, 6), (6, 9), (9, NUM_TOKENS)):
        # The first four tokens come from the prefix cache.
        pair.producer.compute("a", SOURCE, before, after)
    pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
    received = pair.consumer.wait_received("a")
    assert received.outcome is LoadOutcome.LOADED
    assert received.timings is not None
    assert received.timings.num_chunks == 3
    assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE, TARGET))


def test_before_the_forward_only_what_is_cached_leaves(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    step = KVConnectorMetadata(progress=(ProducerProgress(TransferKey.of_handoff("a"), SOURCE, 4, NUM_TOKENS),))
    pair.producer.worker.start_step(step)
    # Chunks are ordered: whatever the start of the step has sent is in when this is.
    pair.hand_over("b", SOURCE, range(12, 16), NUM_TOKENS)
    assert torch.equal(pair.consumer.cache[TARGET[0]], pair.producer.cache[SOURCE[0]])
    assert not pair.consumer.cache[list(TARGET[1:])].any()
    pair.producer.worker.finish_step(step)
    pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
    assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED


def test_several_transfers_share_one_link(pair: Pair) -> None:
    for i, name in enumerate("abc"):
        pair.begin(name, range(4 * i, 4 * i + 4), NUM_TOKENS)
    for num_tokens in (4, 8, NUM_TOKENS):
        for i, name in enumerate("abc"):
            pair.producer.compute(name, range(20 - 4 * i, 24 - 4 * i), 0, num_tokens)
    for name in "abc":
        pair.producer.finish(name, ProducerEnd.HANDED_OVER, 7)
    for name in "abc":
        assert pair.consumer.wait_received(name).outcome is LoadOutcome.LOADED
        pair.producer.wait_finished_sending(name)
    sources = [*range(20, 24), *range(16, 20), *range(12, 16)]
    assert torch.equal(pair.consumer.cache, pair.expected_cache(sources, range(12)))
    assert pair.consumer.stats().num_links == pair.producer.stats().num_links == 1


def test_a_long_chunk_is_cut_and_transfers_take_turns(join: Join) -> None:
    with connected_pair(join, SMALL_CHUNKS) as pair:
        for i, name in enumerate("ab"):
            pair.begin(name, range(12 * i, 12 * i + 12), 48)
        sources = (range(20, 32), range(12))
        for name, source_ids in zip("ab", sources, strict=True):
            pair.producer.compute(name, source_ids, 0, 48)
            pair.producer.finish(name, ProducerEnd.HANDED_OVER, 7)
        for name in "ab":
            received = pair.consumer.wait_received(name)
            assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.LOADED, 48)
            assert received.timings is not None
            assert received.timings.num_chunks == 12, "at least a block at a time"
            pair.producer.wait_finished_sending(name)
        assert torch.equal(pair.consumer.cache, pair.expected_cache([*sources[0], *sources[1]], range(24)))


def test_a_cancel_in_the_middle_of_many_chunks_drains_and_leaves_the_link_whole(join: Join) -> None:
    with connected_pair(join, SMALL_CHUNKS) as pair:
        pair.begin("a", range(16), 64)
        pair.producer.compute("a", range(16), 0, 64)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        pair.consumer.cancel("a")
        received = pair.consumer.wait_received("a")
        assert received.outcome is LoadOutcome.LOADED or received.outcome is LoadOutcome.CANCELLED
        num_valid = received.num_valid_tokens // LAYOUT.block_size
        assert torch.equal(pair.consumer.cache[:num_valid], pair.producer.cache[:num_valid])
        pair.producer.wait_finished_sending("a")
        assert pair.hand_over("b", SOURCE, range(16, 20), NUM_TOKENS).outcome is LoadOutcome.LOADED
        assert pair.consumer.stats().num_links_lost == 0


def test_ready_may_come_before_the_producers_request(pair: Pair) -> None:
    pair.consumer.reserve("early", pair.producer.address, TARGET, NUM_TOKENS)
    # Messages are ordered: when this one is in, the early one is.
    pair.begin("later", range(12, 16), NUM_TOKENS)
    assert not pair.producer.output.ready_to_prefill & {"early"}
    pair.producer.produce("early", pair.consumer.address, NUM_TOKENS)
    pair.producer.wait_ready("early")
    pair.producer.compute("early", SOURCE, 0, NUM_TOKENS)
    pair.producer.finish("early", ProducerEnd.HANDED_OVER, 7)
    assert pair.consumer.wait_received("early").outcome is LoadOutcome.LOADED


def test_a_consumer_may_cancel_in_the_middle(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    pair.producer.compute("a", SOURCE, 0, 8)
    pair.consumer.cancel("a")
    assert pair.producer.wait_failed_sending("a") == "the consumer cancelled the transfer"
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens, received.first_token_id) == (LoadOutcome.CANCELLED, 8, None)
    assert "a" not in pair.producer.output.finished_sending, "the request has not ended yet"
    pair.producer.compute("a", SOURCE, 8, NUM_TOKENS)
    pair.producer.finish("a", ProducerEnd.ABORTED)
    pair.producer.wait_finished_sending("a")
    assert pair.hand_over("b", SOURCE, TARGET, NUM_TOKENS).outcome is LoadOutcome.LOADED, "the link lives on"
    assert pair.consumer.stats().num_transfers_cancelled == 1


def test_a_producer_may_abort_in_the_middle(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    pair.producer.compute("a", SOURCE, 0, 8)
    pair.producer.finish("a", ProducerEnd.ABORTED)
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
    pair.producer.wait_finished_sending("a")
    assert not pair.producer.output.failed_sending


def test_a_request_that_ends_at_the_producer_releases_its_consumer(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
    pair.producer.finish("a", ProducerEnd.FINISHED_HERE)
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.first_token_id) == (LoadOutcome.RELEASED, None)
    pair.producer.wait_finished_sending("a")


def test_a_producer_gives_up_without_ready_and_answers_one_that_comes_late(join: Join) -> None:
    with connected_pair(join, SHORT_READY) as pair:
        pair.producer.produce("a", pair.consumer.address, NUM_TOKENS)
        assert pair.producer.wait_failed_sending("a") == "the consumer did not reserve blocks in time"
        pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.reason) == (LoadOutcome.FAILED, "READY came too late")
        pair.producer.finish("a", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("a")


def test_ready_for_a_request_that_has_ended_is_refused(pair: Pair) -> None:
    pair.producer.produce("a", pair.consumer.address, NUM_TOKENS)
    pair.producer.finish("a", ProducerEnd.ABORTED)
    pair.producer.wait_finished_sending("a")
    pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.reason) == (LoadOutcome.FAILED, "the producer does not have the request")


def test_ready_for_a_request_that_never_comes_is_refused_in_time(join: Join) -> None:
    with connected_pair(join, SHORT_READY) as pair:
        pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.reason) == (LoadOutcome.FAILED, "the producer does not have the request")


def test_a_cancel_before_the_producers_request_is_answered(pair: Pair) -> None:
    pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
    pair.consumer.cancel("a")
    assert pair.consumer.wait_received("a").outcome is LoadOutcome.CANCELLED


@pytest.mark.parametrize(
    ("consumer_layout", "says"),
    [
        (replace(LAYOUT, block_size=6), "block_size, not a multiple: 6 at the consumer, 4 at the producer"),
        (replace(LAYOUT, model_fingerprint="b"), "model: 'b' at the consumer, 'model-a' at the producer"),
    ],
    ids=["block size", "model"],
)
def test_a_handshake_of_unlike_ends_is_refused_with_both_values(
    join: Join, consumer_layout: KVCacheLayout, says: str
) -> None:
    with connected_pair(join, consumer_layout=consumer_layout) as pair:
        pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
        received = pair.consumer.wait_received("a")
        assert received.outcome is LoadOutcome.FAILED
        assert f"refused: {says}" in received.reason
        assert pair.producer.stats().num_links == pair.consumer.stats().num_links == 0


def test_another_incarnation_of_the_producer_is_refused(pair: Pair) -> None:
    pair.consumer.reserve("a", replace(pair.producer.address, incarnation=9), TARGET, NUM_TOKENS)
    received = pair.consumer.wait_received("a")
    assert received.outcome is LoadOutcome.FAILED
    told_by_agent, told_by_handshake = (
        "incarnation: 9 at the consumer, 1 at the producer",
        "not prefill-0, incarnation 9",
    )
    assert told_by_agent in received.reason or told_by_handshake in received.reason


def test_a_ticket_for_another_incarnation_of_the_consumer_is_not_served(pair: Pair) -> None:
    pair.producer.produce("a", replace(pair.consumer.address, incarnation=9), NUM_TOKENS)
    pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
    assert pair.consumer.wait_received("a").outcome is LoadOutcome.FAILED
    assert "a" not in pair.producer.output.ready_to_prefill


def test_a_ticket_of_another_attempt_is_not_served(pair: Pair) -> None:
    pair.hand_over("before", SOURCE, TARGET, NUM_TOKENS)  # Over a link that is up, all that is meant is said.
    pair.producer.produce("a", pair.consumer.address, NUM_TOKENS, attempt=1)
    pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
    pair.consumer.cancel("a")
    pair.begin("b", TARGET, NUM_TOKENS)
    assert pair.producer.stats().dropped_messages == {"another attempt": 2}
    assert "a" not in pair.producer.output.ready_to_prefill


@pytest.mark.parametrize("breaks", ["producer", "consumer"])
def test_a_link_that_breaks_fails_its_transfers_and_is_rebuilt(pair: Pair, breaks: str) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    pair.producer.compute("a", SOURCE, 0, 8)
    # Chunks are ordered: when this one is in, the first two blocks of the other are.
    assert pair.hand_over("b", SOURCE, range(12, 16), NUM_TOKENS).outcome is LoadOutcome.LOADED
    (pair.producer if breaks == "producer" else pair.consumer).abort_links()
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
    assert "prefill-0 lost" in received.reason
    assert "decode-0 lost" in pair.producer.wait_failed_sending("a")
    pair.producer.finish("a", ProducerEnd.ABORTED)
    pair.producer.wait_finished_sending("a")
    assert pair.hand_over("c", SOURCE, range(20, 24), NUM_TOKENS).outcome is LoadOutcome.LOADED
    assert torch.equal(pair.consumer.cache[20:24], pair.producer.cache[list(SOURCE)])
    assert (pair.consumer.stats().num_links_lost, pair.consumer.stats().num_links) == (1, 1)


def test_a_consumer_whose_producer_shuts_down_keeps_what_it_has(pair: Pair) -> None:
    pair.begin("a", TARGET, NUM_TOKENS)
    pair.producer.compute("a", SOURCE, 0, 8)
    pair.hand_over("b", SOURCE, range(12, 16), NUM_TOKENS)
    pair.producer.worker.shutdown()
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)


def test_nobody_at_the_other_end_fails_the_load(join: Join) -> None:
    config = KVTransferConfig(connect_timeout_s=1.0)
    with connected_pair(join, config) as pair:
        nobody = replace(pair.producer.address, engine_id="nobody", control_address="127.0.0.1:1")
        pair.consumer.reserve("a", nobody, TARGET, NUM_TOKENS)
        received = pair.consumer.wait_received("a")
        assert received.outcome is LoadOutcome.FAILED
        assert "link with nobody lost" in received.reason


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_after_shutdown_no_thread_and_no_descriptor_is_left(join: Join) -> None:
    """Ten pairs with four transfers each: whatever a pair leaves behind shows tenfold."""
    process = psutil.Process()
    run_some_transfers(join)
    threads = own_threads()
    num_threads, num_fds = process.num_threads(), process.num_fds()
    for _ in range(10):
        run_some_transfers(join)
    # A pool's descriptor lives as long as its memory: here, until the collector comes by.
    num_pools = 20 if join == "shared memory" else 0
    deadline_s = time.monotonic() + IDLE_S
    while left := [
        *(own_threads() - threads),
        *range(num_threads + NUM_IDLE_GRPC, process.num_threads()),
        *range(num_fds + num_pools + NUM_IDLE_GRPC, process.num_fds()),
    ]:
        assert time.monotonic() < deadline_s, f"threads and descriptors are left: {left}"
        time.sleep(0.05)


def own_threads() -> set[threading.Thread]:
    """Return Python's threads without gRPC's, which comes and goes with its event loops."""
    return {thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name}


def run_some_transfers(join: Join) -> None:
    with connected_pair(join) as pair:
        pair.begin("cancelled", TARGET, NUM_TOKENS)
        pair.producer.compute("cancelled", SOURCE, 0, 8)
        pair.consumer.cancel("cancelled")
        for name in "abc":
            assert pair.hand_over(name, SOURCE, TARGET, NUM_TOKENS).outcome is LoadOutcome.LOADED
        pair.consumer.wait_received("cancelled")
