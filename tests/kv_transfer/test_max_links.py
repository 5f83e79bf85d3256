"""A decode engine fetches from more prefill engines than it keeps links to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from tests.kv_transfer.connected_workers import LAYOUT, Node, Pair

NUM_TOKENS = 4
CONFIG = KVTransferConfig(max_links=2)


@dataclass(frozen=True, slots=True)
class Engines:
    producers: list[Node]
    consumer: Node

    def pair(self, producer: int) -> Pair:
        return Pair(self.producers[producer], self.consumer)

    def hand_over(self, producer: int, request_id: str) -> None:
        assert self.pair(producer).hand_over(request_id, (1,), (2,), NUM_TOKENS).outcome is LoadOutcome.LOADED

    def wait_for_links_to(self, *producers: str) -> None:
        self.consumer.wait_stats(lambda stats: {link.peer_engine_id for link in stats.links} == set(producers))


@pytest.fixture
def engines() -> Iterator[Engines]:
    hub = LoopbackHub()
    names = ("prefill-0", "prefill-1", "prefill-2", "decode-0")
    addresses = [EngineAddress(name, 1, name) for name in names]
    nodes = [Node(CONFIG, address, LAYOUT, hub.control(address)) for address in addresses]
    yield Engines(nodes[:3], nodes[3])
    for node in nodes:
        node.worker.shutdown()


def test_the_idle_link_that_was_used_longest_ago_is_closed(engines: Engines) -> None:
    for producer, request_id in ((0, "a"), (1, "b"), (0, "c")):
        engines.hand_over(producer, request_id)
    assert engines.consumer.stats().num_links == 2
    engines.hand_over(2, "d")
    engines.wait_for_links_to("prefill-0", "prefill-2")
    engines.producers[1].wait_stats(lambda stats: stats.links == ())
    engines.hand_over(1, "e")
    engines.wait_for_links_to("prefill-1", "prefill-2")
    assert [node.stats().num_links_lost for node in (*engines.producers, engines.consumer)] == [0, 0, 0, 0]


def test_a_link_with_a_transfer_is_never_closed_for_it(engines: Engines) -> None:
    for producer, request_id in ((0, "a"), (1, "b"), (2, "c")):
        engines.pair(producer).begin(request_id, (producer,), NUM_TOKENS)
    assert engines.consumer.stats().num_links == 3
    for producer, request_id in ((2, "c"), (1, "b"), (0, "a")):
        node = engines.producers[producer]
        node.compute(request_id, (5,), 0, NUM_TOKENS)
        node.finish(request_id, ProducerEnd.HANDED_OVER, 7)
        assert engines.consumer.wait_received(request_id).outcome is LoadOutcome.LOADED
        node.wait_finished_sending(request_id)
    # The first one that was idle had to go, at once.
    engines.wait_for_links_to("prefill-0", "prefill-1")
    assert engines.consumer.stats().num_links_lost == 0


def test_links_that_others_have_dialled_are_theirs_to_close() -> None:
    hub = LoopbackHub()
    addresses = [EngineAddress(name, 1, name) for name in ("prefill-0", "decode-0", "decode-1", "decode-2")]
    nodes = [Node(CONFIG, address, LAYOUT, hub.control(address)) for address in addresses]
    for consumer, request_id in zip(nodes[1:], "abc", strict=True):
        assert Pair(nodes[0], consumer).hand_over(request_id, (1,), (2,), NUM_TOKENS).outcome is LoadOutcome.LOADED
    assert nodes[0].stats().num_links == 3
    for node in nodes:
        node.worker.shutdown()
