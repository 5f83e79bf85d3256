"""A network that drops everything and tells nobody: each end notices in time, whatever the link is doing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.handoff.control_messages import ControlMessage
from kv_transfer.links import link_liveness
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from kv_transfer.sides import worker_side
from kv_transfer.transfer_stats import LinkState, TransferStats
from kv_transfer.transports.base import DataLink, PendingLink, Transport
from kv_transfer.trust.secret import KeySource
from tests.kv_transfer.connected_workers import LAYOUT, Node, Pair, connected_pair
from tests.kv_transfer.faulty_transport import Faults
from tests.kv_transfer.swallowing_proxy import SwallowingProxy

SOURCE: Final = (17, 3, 29, 8)
TARGET: Final = (2, 30, 11, 6)
NUM_TOKENS: Final = 14
IMPATIENT_S: Final = 0.4
SILENT: Final = "the peer has been silent for 0.4 s"
BROKEN: Final = "the data connection broke while nothing moved on it"
"""The reason of the second end to notice, if the first one has closed the link."""


@dataclass(slots=True)
class Proxies:
    """The proxies of one transport's data links, in the order in which they came up."""

    made: list[SwallowingProxy]


class _ProxiedPendingLink:
    def __init__(self, pending: PendingLink, proxies: Proxies) -> None:
        self._pending = pending
        host, port, token = pending.rendezvous.split("|")
        proxy = SwallowingProxy(int(port)).__enter__()
        proxies.made.append(proxy)
        self.rendezvous = f"{host}|{proxy.port}|{token}"

    def accept(self, *arguments: object) -> DataLink:
        return self._pending.accept(*arguments)  # type: ignore[arg-type]  # as they were given


class _ProxiedTransport:
    """A Transport whose data connections go through proxies."""

    def __init__(self, transport: Transport, proxies: Proxies) -> None:
        self._proxies = proxies
        self._listen = transport.listen
        self.connect = transport.connect
        self.name = transport.name

    def listen(self, key: KeySource | None = None) -> PendingLink:
        return _ProxiedPendingLink(self._listen(key), self._proxies)


@pytest.fixture(autouse=True)
def _frequent_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are looked at ten times a second however patient an engine is."""
    monkeypatch.setattr(link_liveness, "NUM_BEATS", 600)


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxies]:
    """Proxies of the data links of every worker that the test makes."""
    proxies, make_transport = Proxies([]), worker_side.make_transport

    def make(*arguments: object) -> Transport:
        transport: Transport = make_transport(*arguments)  # type: ignore[arg-type]  # as they were given
        return _ProxiedTransport(transport, proxies)

    monkeypatch.setattr(worker_side, "make_transport", make)
    yield proxies
    for proxy in proxies.made:
        proxy.__exit__(None, None, None)


@contextmanager
def _pair_behind_a_proxy() -> Iterator[tuple[Pair, SwallowingProxy]]:
    """The consumer dials the producer's control stream through the proxy."""
    with connected_pair("tcp") as pair:
        host, _, port = pair.producer.address.control_address.partition(":")
        with SwallowingProxy(int(port)) as proxy:
            pair.producer.address = replace(pair.producer.address, control_address=f"{host}:{proxy.port}")
            yield pair, proxy


@contextmanager
def _impatient(pair: Pair) -> Iterator[None]:
    """Both ends give a silent peer up soon. Until then, and afterwards, they wait for a peer on a busy machine."""
    pulses = [node.worker._agent._links._pulse for node in (pair.producer, pair.consumer)]
    patient_s = pulses[0]._timeout_s
    for pulse in pulses:
        pulse._timeout_s = IMPATIENT_S
    yield
    for pulse in pulses:
        pulse._timeout_s = patient_s


def _wait_lost(node: Node) -> str:
    """Until the node's only link is dead; what for."""

    def is_lost(stats: TransferStats) -> bool:
        return [link.state for link in stats.links] == [LinkState.DEAD]

    (link,) = node.wait_stats(is_lost).links
    return link.last_error


def _check_that_all_is_well(pair: Pair) -> None:
    """The next transfer dials anew; the consumer shows its link with what the one before it was lost for."""
    assert pair.hand_over("next", SOURCE, range(12, 16), NUM_TOKENS).outcome is LoadOutcome.LOADED
    for node in (pair.producer, pair.consumer):
        stats = node.wait_stats(lambda stats: stats.num_active_transfers == 0)
        assert (stats.num_links, stats.num_pinned_blocks) == (1, 0)
        assert [link.state for link in stats.links] == [LinkState.OPEN]
    (link,) = pair.consumer.stats().links
    assert link.last_error != ""


# -- the control stream falls silent -----------------------------------------------------------------------------------


def test_an_idle_link_whose_peer_falls_silent_is_closed_at_both_ends() -> None:
    with _pair_behind_a_proxy() as (pair, proxy):
        pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        proxy.swallow()
        with _impatient(pair):
            reasons = {_wait_lost(node) for node in (pair.producer, pair.consumer)}
        assert SILENT in reasons <= {SILENT, BROKEN}
        proxy.heal()
        _check_that_all_is_well(pair)
        assert pair.consumer.stats().num_links_lost == 0, "nothing was lost with it"


def test_a_request_that_waits_for_its_first_chunk_is_given_back_to_both_ends() -> None:
    with _pair_behind_a_proxy() as (pair, proxy):
        pair.begin("a", TARGET, NUM_TOKENS)
        proxy.swallow()
        with _impatient(pair):
            received = pair.consumer.wait_received("a")
            assert received.outcome is LoadOutcome.FAILED
            reasons = {received.reason, pair.producer.wait_failed_sending("a").replace("decode-0", "prefill-0")}
        lost = "link with prefill-0 lost: "
        assert lost + SILENT in reasons <= {lost + SILENT, lost + BROKEN}
        pair.producer.finish("a", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("a")
        assert not pair.consumer.cache.any()
        proxy.heal()
        _check_that_all_is_well(pair)


def test_what_arrived_before_the_silence_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    has_arrived = threading.Event()
    Faults(after_receive=lambda blocks: has_arrived.set()).install(monkeypatch)
    with _pair_behind_a_proxy() as (pair, proxy):
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.producer.compute("a", SOURCE, 0, 8)
        assert has_arrived.wait(60.0)
        proxy.swallow()
        with _impatient(pair):
            received = pair.consumer.wait_received("a")
            pair.producer.wait_failed_sending("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
        assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE[:2], TARGET[:2]))


class _Mute:
    """An engine that takes every call and never answers."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        pass

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        pass

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        pass


def test_a_load_that_is_cancelled_while_its_producer_does_not_answer_gives_its_blocks_back_at_once() -> None:
    hub = LoopbackHub()
    hub.register("prefill-0", _Mute())
    address = EngineAddress("decode-0", 1, "decode-0")
    node = Node(KVTransferConfig(), address, LAYOUT, hub.control(address))
    try:
        for request_id in ("a", "b"):
            node.reserve(request_id, EngineAddress("prefill-0", 1, "prefill-0"), TARGET, NUM_TOKENS)
        node.cancel("a")
        assert node.wait_received("a").outcome is LoadOutcome.CANCELLED
        (link,) = node.worker._agent._links._links.values()
        assert [getattr(message, "transfer_id", "") for message in link.unsent] == ["t-b"]
        assert node.stats().num_active_transfers == 1
    finally:
        node.worker.shutdown()


# -- the data connection falls silent, or breaks -----------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 100, 700], ids=["before a chunk", "in its header", "inside a chunk"])
def test_a_chunk_that_is_swallowed_costs_its_link_and_nothing_else(proxies: Proxies, num_bytes: int) -> None:
    with connected_pair("tcp") as pair:
        pair.hand_over("first", SOURCE, range(12, 16), NUM_TOKENS)
        pair.begin("a", TARGET, NUM_TOKENS)
        (proxy,) = proxies.made
        if num_bytes:
            proxy.swallow_after(num_bytes)
        else:
            proxy.swallow()
        pair.consumer.grow_impatient(IMPATIENT_S)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 0)
        assert "a chunk did not move before its deadline" in received.reason
        pair.producer.wait_finished_sending("a")
        assert pair.consumer.stats().num_stalls == 1
        _check_that_all_is_well(pair)


def test_an_idle_data_connection_that_breaks_is_replaced_before_it_is_needed(proxies: Proxies) -> None:
    with connected_pair("tcp") as pair:
        pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        (proxy,) = proxies.made
        proxy.cut()
        pair.consumer.wait_stats(lambda stats: stats.num_links == 0)
        pair.producer.wait_stats(lambda stats: stats.num_links == 0)
        assert pair.hand_over("b", SOURCE, range(12, 16), NUM_TOKENS).outcome is LoadOutcome.LOADED
        assert [node.stats().num_links_lost for node in (pair.producer, pair.consumer)] == [0, 0]
