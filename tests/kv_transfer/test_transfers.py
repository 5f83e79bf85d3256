"""What the table of transfers does by itself: deadlines of loads whose producer says nothing."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector import KVConnectorMetadata, LoadOutcome, Reservation
from kv_transfer.control import ControlStream
from kv_transfer.link import ChunkJob
from kv_transfer.links import LinkTable
from kv_transfer.loopback import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.peer_link import LinkState, PeerLink
from kv_transfer.transfers import TransferTable
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.wire import ControlMessage
from tests.kv_transfer.connected_workers import LAYOUT

PREFILL = EngineAddress("prefill-0", 1, "prefill-0")
DECODE = EngineAddress("decode-0", 1, "decode-0")
CONFIG = KVTransferConfig(transport="loopback", chunk_timeout_s=5.0)


class Deaf:
    """Hears everything and does nothing, as a producer and as an agent."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        pass

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        pass

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob) -> None:
        pass

    def on_data_dead(self, link: PeerLink, reason: str) -> None:
        pass


def test_a_cancel_without_an_answer_closes_the_link_once_and_reports_when_it_is_dead() -> None:
    hub = LoopbackHub()
    hub.register(PREFILL.engine_id, Deaf())
    cache = torch.zeros(LAYOUT.shape)
    links = LinkTable(CONFIG, DECODE, LAYOUT, cache, LoopbackTransport(hub), hub.control(DECODE), Deaf())
    table = TransferTable(CONFIG, LAYOUT, links)
    ticket = KVTransferParams("t", 0, TransferRole.CONSUMER, PREFILL)
    table.on_step(KVConnectorMetadata(reservations=(Reservation("r", ticket, (1, 2), 0, 8),)), now_s=100.0)
    assert table.next_deadline() is None
    table.on_step(KVConnectorMetadata(consumer_cancels=("r",)), now_s=100.0)
    assert table.next_deadline() == pytest.approx(105.0)
    assert table.on_time(104.9) == []
    (link,) = table.on_time(105.0)

    # Its data thread has not ended yet: the agent must not spin on a deadline that has passed.
    link.state = LinkState.CLOSING
    assert table.next_deadline() is None
    assert table.on_time(106.0) == []
    assert table.take_output(num_links=0).is_empty(), "the transport may still write"

    table.on_link_dead(link)
    assert table.take_output(num_links=0).finished_recving["r"].outcome is LoadOutcome.CANCELLED
