"""The table of transfers by itself: turns on a link, deadlines of loads whose producer says nothing.

Tests of kv_transfer/agent/consumer_transfers.py, kv_transfer/agent/producer_transfers.py.
"""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest
import torch

from kv_transfer.agent.transfer_table import TransferTable
from kv_transfer.block_pieces import PieceMap
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.handoff.control_messages import Cancel, Chunk, ControlMessage, Finished, Ready
from kv_transfer.link_load import LinkLoad
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.transports.loopback import LoopbackTransport
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.reported import Name, Reported

PREFILL = EngineAddress("prefill-0", 1, "prefill-0")
DECODE = EngineAddress("decode-0", 1, "decode-0")
CONFIG = KVTransferConfig(transport="loopback", chunk_timeout_s=5.0)


class Deaf:
    """Hears everything and does nothing, as a producer and as an agent."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        pass

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        pass

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        pass

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob) -> None:
        pass

    def on_data_dead(self, link: PeerLink, reason: str) -> None:
        pass


class Producer:
    """A table whose links say nothing by themselves: the test sends the chunks, one block each."""

    def __init__(self) -> None:
        self.said: list[ControlMessage] = []
        self.jobs: deque[ChunkJob] = deque()
        hub = LoopbackHub()
        cache = torch.zeros(LAYOUT.shape)
        config = CONFIG.model_copy(update={"max_chunk_bytes": LAYOUT.block_size_bytes})
        links = LinkTable(config, PREFILL, LAYOUT, cache, LoopbackTransport(hub), hub.control(PREFILL), Deaf())
        self.link = PeerLink(cast(ControlStream, self), True, ("decode-0", 1), None, LinkState.OPEN)
        self.link.data = cast(DataThread, self)
        self.link.pieces = PieceMap(LAYOUT, LAYOUT, cache, is_producer=True)
        self.table = TransferTable(config, LAYOUT, links)

    def send(self, message: ControlMessage) -> None:
        self.said.append(message)

    def put(self, job: ChunkJob) -> None:
        self.jobs.append(job)

    def hand_over(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Everything up to FINISHED."""
        num_tokens = len(block_ids) * LAYOUT.block_size
        ticket = KVTransferParams(request_id, 0, TransferRole.PRODUCER, DECODE)
        self.table.on_step(
            KVConnectorMetadata(new_producers=((TransferKey.of_handoff(request_id), ticket, num_tokens),)), 0.0
        )
        self.table.on_consumer_message(self.link, Ready(request_id, 0, 0, num_tokens), 0.0)
        self.table.on_computed([ProducerProgress(TransferKey.of_handoff(request_id), block_ids, 0, num_tokens)])
        finish = ProducerFinish(TransferKey.of_handoff(request_id), ProducerEnd.HANDED_OVER, 7)
        self.table.on_step(KVConnectorMetadata(producer_finishes=(finish,)), 0.0)

    def send_a_chunk(self) -> str:
        """Send the next chunk; returns the name of its transfer."""
        job = self.jobs.popleft()
        self.table.on_chunk_moved(self.link, job, 0.0)
        return str(job.transfer_id)

    def finished_sending(self) -> set[Name]:
        return Reported.of(self.table.take_output(num_links=1)).finished_sending


def test_a_short_transfer_behind_a_long_one_ends_after_a_few_of_its_chunks() -> None:
    producer = Producer()
    producer.hand_over("long", tuple(range(30)))
    producer.hand_over("short", (30,))
    assert len(producer.jobs) == 2, "enough for the data thread, and no more"
    sent: list[str] = []
    while not producer.finished_sending():
        sent.append(producer.send_a_chunk())
    assert sent == ["long"] * 3 + ["short"]


def test_finished_is_said_at_once_and_the_blocks_are_free_when_the_last_chunk_has_left() -> None:
    producer = Producer()
    producer.hand_over("a", (1, 2, 3))
    assert producer.said == [
        Chunk("a", 0, 0, 1),
        Chunk("a", 0, 1, 1),
        Finished("a", 0, ProducerEnd.HANDED_OVER, 3, 7, ""),
    ]
    producer.send_a_chunk()
    assert producer.said[3:] == [Chunk("a", 0, 2, 1)]
    producer.send_a_chunk()
    assert producer.finished_sending() == set()
    producer.send_a_chunk()
    assert producer.finished_sending() == {"a"}
    assert not producer.jobs


def test_a_cancel_takes_back_what_was_promised_and_leaves_the_others_alone() -> None:
    producer = Producer()
    producer.hand_over("a", (1, 2, 3, 4))
    producer.hand_over("b", (5, 6))
    producer.table.on_consumer_message(producer.link, Cancel("a", 0), 0.0)
    assert producer.said[-1] == Finished("a", 0, ProducerEnd.ABORTED, 2, None, "the consumer cancelled the transfer")
    assert [producer.send_a_chunk() for _ in range(4)] == ["a", "a", "b", "b"]
    assert producer.finished_sending() == {"a", "b"}
    assert Reported.of(producer.table.take_output(num_links=1)).failed_sending == {}


def test_a_link_to_one_of_several_ranks_is_a_link_to_their_engine() -> None:
    producer = Producer()
    peer = EngineAddress("decode-0", 1, "decode-0", ("decode-0:1",)).of_rank(1)
    ticket = KVTransferParams("a", 0, TransferRole.PRODUCER, peer)
    key = TransferKey.of_handoff("a").of_part(1)
    producer.table.on_step(KVConnectorMetadata(new_producers=((key, ticket, LAYOUT.block_size),)), 0.0)
    stats = producer.table.take_output(num_links=1).stats
    assert stats is not None
    assert stats.link_loads == (LinkLoad("decode-0", LAYOUT.block_size_bytes),)


def test_what_is_queued_on_a_link_dies_with_it() -> None:
    producer = Producer()
    producer.hand_over("a", (1, 2, 3, 4))
    producer.link.state = LinkState.CLOSING
    num_said = len(producer.said)
    producer.send_a_chunk()
    assert (len(producer.jobs), len(producer.said)) == (1, num_said), "a closing link announces nothing"
    producer.table.on_link_dead(producer.link)
    assert producer.finished_sending() == {"a"}


def test_a_cancel_without_an_answer_closes_the_link_once_and_reports_when_it_is_dead() -> None:
    hub = LoopbackHub()
    hub.register(PREFILL.engine_id, Deaf())
    cache = torch.zeros(LAYOUT.shape)
    links = LinkTable(CONFIG, DECODE, LAYOUT, cache, LoopbackTransport(hub), hub.control(DECODE), Deaf())
    table = TransferTable(CONFIG, LAYOUT, links)
    ticket = KVTransferParams("t", 0, TransferRole.CONSUMER, PREFILL)
    table.on_step(
        KVConnectorMetadata(reservations=(Reservation(TransferKey.of_handoff("r"), ticket, (1, 2), 0, 8),)), now_s=100.0
    )
    assert table.next_deadline() is None
    link = links.to_producer(PREFILL)
    link.state, link.unsent = LinkState.OPEN, []  # READY is said.
    table.on_step(KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff("r"),)), now_s=100.0)
    assert table.next_deadline() == pytest.approx(105.0)
    assert table.on_time(104.9) == []
    assert table.on_time(105.0) == [link]

    # Its data thread has not ended yet: the agent must not spin on a deadline that has passed.
    link.state = LinkState.CLOSING
    assert table.next_deadline() is None
    assert table.on_time(106.0) == []
    assert table.take_output(num_links=0).is_empty(), "the transport may still write"

    table.on_link_dead(link)
    assert Reported.of(table.take_output(num_links=0)).finished_recving["r"].outcome is LoadOutcome.CANCELLED


def test_a_second_transfer_under_one_key_is_a_bug_at_either_end() -> None:
    producer, key = Producer(), TransferKey.of_handoff("r")
    tickets = [KVTransferParams(transfer_id, 0, TransferRole.PRODUCER, DECODE) for transfer_id in ("t", "u")]
    with pytest.raises(AssertionError, match=r"a second transfer under one key: r \(handoff\)"):
        producer.table.on_step(KVConnectorMetadata(new_producers=tuple((key, ticket, 8) for ticket in tickets)), 0.0)

    loads = [KVTransferParams(transfer_id, 0, TransferRole.CONSUMER, DECODE) for transfer_id in ("v", "w")]
    reservations = tuple(Reservation(key, ticket, (1, 2), 0, 8) for ticket in loads)
    with pytest.raises(AssertionError, match=r"a second load under one key: r \(handoff\)"):
        producer.table.on_step(KVConnectorMetadata(reservations=reservations), 0.0)
