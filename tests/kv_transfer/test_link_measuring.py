"""The load of links, measured while two agents hand KV over for real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import pytest
from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.link_load import LinkLoad
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.loopback import Pipe
from tests.kv_transfer.connected_workers import LAYOUT, Join, Node, Pair, connected_pair

SOURCE: Final = tuple(range(16))
TARGET: Final = tuple(range(31, 15, -1))
NUM_TOKENS: Final = 16 * LAYOUT.block_size
NUM_BYTES: Final = 16 * LAYOUT.block_size_bytes
SLOW_BYTES_PER_S: Final = 400_000.0
FOUR_CHUNKS: Final = KVTransferConfig(max_chunk_bytes=NUM_BYTES // 4)


def hand_over_timed(pair: Pair) -> float:
    """Hand one request over; how many bytes a second that was, with all that a transfer is beside its chunks."""
    began_s = time.monotonic()
    pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
    return NUM_BYTES / (time.monotonic() - began_s)


def link_of(node: Node) -> LinkLoad:
    (load,) = node.stats().link_loads
    return load


def throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each chunk take its time before the loopback's copy."""
    send = Pipe.send

    def send_slowly(pipe: Pipe, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        time.sleep(sum(block.nbytes for block in blocks) / SLOW_BYTES_PER_S)
        send(pipe, blocks, timeout_s, after)

    monkeypatch.setattr(Pipe, "send", send_slowly)


def test_the_bandwidth_of_a_throttled_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    throttle(monkeypatch)
    with connected_pair("loopback", FOUR_CHUNKS) as pair:
        slowest = hand_over_timed(pair)
        load = link_of(pair.producer)
        assert load.peer == "decode-0"
        assert load.num_queued_bytes == 0
        # A busy machine only adds time: the link cannot seem faster than it is.
        assert slowest < load.bytes_per_s <= SLOW_BYTES_PER_S
        assert not pair.consumer.stats().link_loads


def test_a_limit_of_the_bandwidth_is_measured_as_the_bandwidth() -> None:
    config = FOUR_CHUNKS.model_copy(update={"max_send_mib_per_s": SLOW_BYTES_PER_S / 2**20})
    with connected_pair("loopback", config) as pair:
        slowest = hand_over_timed(pair)
        assert slowest < link_of(pair.producer).bytes_per_s <= SLOW_BYTES_PER_S


def test_the_bandwidth_survives_a_new_link(monkeypatch: pytest.MonkeyPatch) -> None:
    throttle(monkeypatch)
    with connected_pair("loopback", FOUR_CHUNKS) as pair:
        pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        measured = link_of(pair.producer).bytes_per_s
        pair.producer.abort_links()
        pair.producer.wait_stats(lambda stats: not stats.num_links)
        assert link_of(pair.producer).bytes_per_s == measured
        pair.begin("b", TARGET, NUM_TOKENS)
        assert link_of(pair.producer).bytes_per_s == measured


@pytest.mark.parametrize("join", ["loopback", "tcp", "shared memory"])
def test_the_round_trip_is_measured_when_a_link_opens(join: Join) -> None:
    with connected_pair(join) as pair:
        pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        pair.begin("b", TARGET, NUM_TOKENS)
        pair.producer.wait_stats(lambda stats: stats.link_loads[0].round_trip_s > 0)


def test_bytes_are_queued_from_the_ticket_on_until_they_have_left() -> None:
    with connected_pair("loopback", FOUR_CHUNKS) as pair:
        pair.producer.produce("a", pair.consumer.address, NUM_TOKENS)
        pair.producer.produce("b", pair.consumer.address, 1)
        pair.consumer.reserve("a", pair.producer.address, TARGET, NUM_TOKENS)
        pair.producer.wait_ready("a")
        assert link_of(pair.producer).num_queued_bytes == NUM_BYTES + LAYOUT.block_size_bytes
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        pair.producer.wait_finished_sending("a")
        assert link_of(pair.producer).num_queued_bytes == LAYOUT.block_size_bytes


def test_what_the_consumer_has_need_not_be_sent() -> None:
    with connected_pair("loopback") as pair:
        pair.begin("a", TARGET, NUM_TOKENS, num_local_blocks=10)
        assert link_of(pair.producer).num_queued_bytes == 6 * LAYOUT.block_size_bytes


@pytest.mark.parametrize("way", ["consumer cancels", "request ends", "link breaks"])
def test_nothing_is_queued_once_a_transfer_is_given_up(way: str) -> None:
    with connected_pair("loopback", FOUR_CHUNKS) as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        _give_up(pair, way)
        pair.producer.wait_finished_sending("a")
        assert link_of(pair.producer).num_queued_bytes == 0


def _give_up(pair: Pair, way: str) -> None:
    if way == "consumer cancels":
        pair.consumer.cancel("a")
        pair.producer.wait_failed_sending("a")
    elif way == "link breaks":
        pair.producer.abort_links()
        pair.producer.wait_failed_sending("a")
    if way != "request ends":
        assert link_of(pair.producer).num_queued_bytes == 0
    pair.producer.finish("a", ProducerEnd.ABORTED)
