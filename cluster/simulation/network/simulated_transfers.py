"""The handoffs of a simulated engine: the product's machines at both ends, and a network in place of links.

This does what kv_transfer's agent does around the machines. A link is open as soon as it is needed. What the agent does
on its own thread happens here at once, and is reported to the scheduler with the next step that ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cluster.routing.engine_connection import EngineKey
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.network.open_transfers import Loading, Sending, SendingLink
from cluster.simulation.network.shared_network import SharedNetwork
from cluster.simulation.network.simulated_stores import SimulatedStores
from kv_transfer.agent.link_meter import LinkMeter
from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import (
    FailedSending,
    FetchWanted,
    FinishedReceiving,
    FinishedSending,
    KVConnectorOutput,
    ReadyToPrefill,
    TransferReport,
)
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerProgress, Reservation
from kv_transfer.handoff.chunk_queue import ChunkQueue, QueuedChunk
from kv_transfer.handoff.consumer_machine import ConsumerMachine
from kv_transfer.handoff.control_messages import Cancel, Chunk, Finished, Ready
from kv_transfer.handoff.instructions import (
    DropQueued,
    Instruction,
    ReceiveBlocks,
    ReportFailedSending,
    ReportFinishedSending,
    ReportReady,
    ReportReceived,
    Send,
    SendBlocks,
)
from kv_transfer.handoff.producer_machine import ProducerMachine, ProducerState
from kv_transfer.handoff.transfer_story import TransferStory
from kv_transfer.link_load import LinkLoad
from kv_transfer.params import EngineAddress, KVTransferParams, TransferId

_MAX_ENDED: Final = 4096
Message = Ready | Cancel | Chunk | Finished
Peers = Callable[[EngineKey], "SimulatedTransfers | None"]


class SimulatedTransfers:
    """The worker's side of the connector of one engine."""

    def __init__(
        self,
        engine: EngineKey,
        cluster: ClusterSpec,
        block_size: int,
        *,
        events: EventQueue,
        network: SharedNetwork,
        peers: Peers,
        on_progress: Callable[[], None],
    ) -> None:
        """peers: return another engine's transfers; on_progress: called when there is something to report"""
        self._engine = engine
        self._config = cluster.kv_transfer
        self._block_size = block_size
        self._block_size_bytes = block_size * cluster.kv_bytes_per_token
        self._state_bytes = cluster.state_bytes
        self._events = events
        self._network = network
        self._peers = peers
        self._on_progress = on_progress
        self._sending: dict[TransferId, Sending] = {}
        self._loading: dict[TransferId, Loading] = {}
        self._transfer_of_key: dict[TransferKey, TransferId] = {}
        self._early: dict[TransferId, tuple[EngineKey, Ready]] = {}
        self._ended: OrderedDict[TransferId, None] = OrderedDict()
        """Transfers that ended without a READY: it is refused when it comes."""
        self._links: dict[EngineKey, SendingLink] = {}
        self._reports: list[TransferReport] = []
        self._meter = LinkMeter()
        self._stores = SimulatedStores(events, self._block_size_bytes / cluster.host_bytes_per_s, self._report)
        self.num_sent_bytes = 0

    # -- the connector's interface -------------------------------------------------------------------------------

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Begin what a step asks for, before it computes; in the order in which the agent does."""
        for key, params, num_prompt_tokens in metadata.new_producers:
            self._begin_sending(key, params, num_prompt_tokens)
        for progress in metadata.progress:
            self._progress(progress, progress.num_computed_tokens_before)
        for reservation in metadata.reservations:
            self._begin_loading(reservation)
        for finish in metadata.producer_finishes:
            if (sending := self._sending_of(finish.key)) is not None:
                self._follow_sending(sending, sending.machine.on_finish(finish.end, finish.first_token_id))
        if metadata.stores is not None:
            self._stores.start_step(metadata.stores)
        for key in metadata.consumer_cancels:
            if (loading := self._loading.get(self._transfer_of_key.get(key, ""))) is not None:
                self._follow_loading(loading, loading.machine.on_cancel(self._events.now_s))
                self._watch_drain(loading)

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that a step has computed."""
        for progress in metadata.progress:
            self._progress(progress, progress.num_computed_tokens_after)

    @property
    def has_output(self) -> bool:
        """Whether anything has happened since the last take_output()."""
        return bool(self._reports)

    def take_output(self) -> KVConnectorOutput:
        """Return what has happened since the last call."""
        output, self._reports = KVConnectorOutput(self._reports), []
        return output

    def link_loads(self) -> tuple[LinkLoad, ...]:
        """Return the loads of the links on which this engine sends."""
        return self._meter.loads()

    # -- what the scheduler asks for -----------------------------------------------------------------------------

    def _begin_sending(self, key: TransferKey, params: KVTransferParams, num_prompt_tokens: int) -> None:
        now_s, transfer_id = self._events.now_s, params.transfer_id
        machine = ProducerMachine(
            transfer_id=transfer_id,
            attempt=params.attempt,
            num_prompt_tokens=num_prompt_tokens,
            block_size=self._block_size,
            max_chunk_blocks=max(1, self._config.max_chunk_bytes // self._block_size_bytes),
            deadline_s=now_s + self._config.ready_timeout_s,
            content_hash=params.content_hash,
            story=TransferStory(self._events.clock),
        )
        sending = Sending(key, _key(params.peer), machine)
        sending.num_promised_bytes = self._size_bytes(machine, 0, -(-num_prompt_tokens // self._block_size))
        self._sending[transfer_id] = sending
        self._transfer_of_key[key] = transfer_id
        self._count(sending)
        self._events.at(machine.deadline_s, self._check_ready, sending)
        if (early := self._early.pop(transfer_id, None)) is not None:
            self._on_ready(sending, early[1])

    def _check_ready(self, sending: Sending) -> None:
        if sending.machine.is_awaiting_ready:
            self._follow_sending(sending, sending.machine.on_time(self._events.now_s))

    def _progress(self, progress: ProducerProgress, num_computed_tokens: int) -> None:
        sending = self._sending_of(progress.key)
        if sending is not None and sending.has_link:
            self._follow_sending(sending, sending.machine.on_computed(progress.block_ids, num_computed_tokens))

    def _begin_loading(self, reservation: Reservation) -> None:
        params = reservation.params
        machine = ConsumerMachine(
            transfer_id=params.transfer_id,
            attempt=params.attempt,
            block_ids=reservation.block_ids,
            num_local_blocks=reservation.num_local_blocks,
            num_prompt_tokens=reservation.num_prompt_tokens,
            block_size=self._block_size,
            block_size_bytes=self._block_size_bytes,
            drain_timeout_s=self._config.chunk_timeout_s,
            fetch=reservation.fetch,
            content_hash=params.content_hash,
            story=TransferStory(self._events.clock),
        )
        loading = Loading(reservation.key, _key(params.peer), machine)
        self._loading[params.transfer_id] = loading
        self._transfer_of_key[reservation.key] = params.transfer_id
        if self._network.reaches(self._engine, loading.peer):
            self._follow_loading(loading, machine.start())
        else:
            # The link cannot be opened. A host says at once that a process is gone, and says nothing if it is cut off.
            is_there = self._network.has(loading.peer)
            wait_s = self._config.connect_timeout_s if is_there else 2 * self._network.latency_s
            reason = "the producer could not be reached"
            self._events.at(self._events.now_s + wait_s, self._fail_loading, loading, reason)

    def _fail_loading(self, loading: Loading, reason: str) -> None:
        self._follow_loading(loading, loading.machine.on_link_lost(reason))

    def _watch_drain(self, loading: Loading) -> None:
        if loading.machine.deadline_s is not None:
            self._events.at(loading.machine.deadline_s, self._check_drain, loading)

    def _check_drain(self, loading: Loading) -> None:
        if loading.machine.is_overdue(self._events.now_s):
            self._fail_loading(loading, "the producer did not answer a cancel in time")

    def _sending_of(self, key: TransferKey) -> Sending | None:
        return self._sending.get(self._transfer_of_key.get(key, ""))

    # -- what peers send, and what becomes of links ----------------------------------------------------------------

    def on_message(self, peer: EngineKey, message: Message) -> None:
        """Give a message to the transfer that it is about."""
        match message:
            case Ready():
                self._take_ready(peer, message)
            case Cancel():
                if (sending := self._sending.get(message.transfer_id)) is not None:
                    self._follow_sending(sending, sending.machine.on_cancel("the consumer cancelled the transfer"))
                elif self._early.pop(message.transfer_id, None) is not None:
                    self._refuse(peer, message)
            case Chunk():
                if (loading := self._loading.get(message.transfer_id)) is not None:
                    self._follow_loading(loading, loading.machine.on_chunk(message, self._events.now_s))
            case Finished():
                if (loading := self._loading.get(message.transfer_id)) is not None:
                    self._follow_loading(loading, loading.machine.on_finished(message, self._events.now_s))

    def on_chunk_received(self, transfer_id: TransferId, num_blocks: int) -> None:
        """Count a chunk whose last byte has arrived."""
        if (loading := self._loading.get(transfer_id)) is not None:
            self._follow_loading(loading, loading.machine.on_chunk_received(num_blocks, self._events.now_s))

    def on_link_lost(self, peer: EngineKey) -> None:
        """Fail all transfers with a peer: it has died, or has been silent for too long."""
        reason = f"link with {peer[0]} lost"
        if (link := self._links.pop(peer, None)) is not None and link.flow is not None:
            self._network.stop(link.flow)
        for sending in [one for one in self._sending.values() if one.peer == peer]:
            sending.num_queued_bytes = sending.num_sent_bytes
            self._follow_sending(sending, sending.machine.on_link_lost(reason))
        for loading in [one for one in self._loading.values() if one.peer == peer]:
            self._follow_loading(loading, loading.machine.on_link_lost(reason))

    def _take_ready(self, peer: EngineKey, message: Ready) -> None:
        sending = self._sending.get(message.transfer_id)
        if sending is None and message.transfer_id in self._ended:
            del self._ended[message.transfer_id]
            self._refuse(peer, message)
        elif sending is None:
            self._early[message.transfer_id] = peer, message
            if message.fetch is not None:
                address = EngineAddress(peer[0], peer[1], "")
                self._report(FetchWanted(WantedFetch(message.attempt, address, message.fetch)))
            limit_s = self._events.now_s + self._config.ready_timeout_s
            self._events.at(limit_s, self._expire, message)
        elif sending.peer == peer and sending.machine.attempt == message.attempt:
            self._on_ready(sending, message)
        else:
            self._refuse(peer, message)

    def _expire(self, message: Ready) -> None:
        if (early := self._early.get(message.transfer_id)) is not None and early[1] is message:
            del self._early[message.transfer_id]
            self._refuse(early[0], message)

    def _on_ready(self, sending: Sending, message: Ready) -> None:
        sending.has_link = True
        num_blocks = -(-sending.machine.num_prompt_tokens // self._block_size) - message.first_block
        sending.num_promised_bytes = self._size_bytes(sending.machine, message.first_block, num_blocks)
        self._follow_sending(sending, sending.machine.on_ready(message))

    def _refuse(self, peer: EngineKey, message: Ready | Cancel) -> None:
        reason = "the producer does not have the request"
        self._send(peer, Finished(message.transfer_id, message.attempt, ProducerEnd.ABORTED, 0, None, reason))

    def _send(self, peer: EngineKey, message: Message) -> None:
        if (other := self._peers(peer)) is not None:
            self._network.send(self._engine, peer, partial(other.on_message, self._engine, message))

    # -- what machines instruct ----------------------------------------------------------------------------------

    def _follow_sending(self, sending: Sending, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._send(sending.peer, message)
                case SendBlocks(first_block, block_ids):
                    self._queue(sending, first_block, block_ids)
                case DropQueued():
                    if (link := self._links.get(sending.peer)) is not None:
                        sending.num_queued_bytes -= link.chunks.drop(sending.machine.transfer_id)
                case ReportReady():
                    self._report(ReadyToPrefill(sending.key))
                case ReportFailedSending(reason):
                    self._report(FailedSending(sending.key, reason))
                case ReportFinishedSending():
                    self._report(FinishedSending(sending.key))
                    self._forget(sending)
                case _:
                    raise AssertionError(f"this is no instruction of a producer: {instruction}")
        self._count(sending)

    def _forget(self, sending: Sending) -> None:
        transfer_id = sending.machine.transfer_id
        del self._sending[transfer_id]
        del self._transfer_of_key[sending.key]
        if not sending.has_link:
            self._ended[transfer_id] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)

    def _follow_loading(self, loading: Loading, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._send(loading.peer, message)
                case ReceiveBlocks():
                    pass  # The sender's flow tells when the bytes are here.
                case ReportReceived(received):
                    self._report(FinishedReceiving(loading.key, received))
                    del self._loading[loading.machine.transfer_id]
                    del self._transfer_of_key[loading.key]
                case _:
                    raise AssertionError(f"this is no instruction of a consumer: {instruction}")

    def _report(self, report: TransferReport) -> None:
        self._reports.append(report)
        self._on_progress()

    def _count(self, sending: Sending) -> None:
        is_over = sending.machine.state is ProducerState.OVER
        num_bytes = 0 if is_over else sending.num_unsent_bytes
        if num_bytes != sending.num_counted_bytes:
            self._meter.queue(sending.peer[0], sending.peer[0], num_bytes - sending.num_counted_bytes)
            sending.num_counted_bytes = num_bytes

    # -- the data links ------------------------------------------------------------------------------------------

    def _queue(self, sending: Sending, first_block: int, block_ids: tuple[int, ...]) -> None:
        link = self._links.get(sending.peer)
        if link is None:
            link = self._links[sending.peer] = SendingLink(ChunkQueue(self._config.max_chunk_bytes), [])
        num_bytes = self._size_bytes(sending.machine, first_block, len(block_ids))
        sending.num_queued_bytes += num_bytes
        link.chunks.put(QueuedChunk(sending.machine.transfer_id, first_block, block_ids, num_bytes))
        self._announce(sending.peer, link)

    def _size_bytes(self, machine: ProducerMachine, first_block: int, num_blocks: int) -> int:
        """Return the bytes of so many blocks of a prompt, and of the state that follows its last block."""
        if num_blocks <= 0:
            return 0
        is_last = first_block + num_blocks == -(-machine.num_prompt_tokens // self._block_size)
        return num_blocks * self._block_size_bytes + (self._state_bytes if is_last else 0)

    def _announce(self, peer: EngineKey, link: SendingLink) -> None:
        while (chunk := link.chunks.take()) is not None:
            machine = self._sending[chunk.transfer_id].machine
            machine.on_chunk_announced()
            self._send(peer, Chunk(machine.transfer_id, machine.attempt, chunk.first_block, len(chunk.block_ids)))
            link.jobs.append(chunk)
        if link.flow is None and link.jobs:
            link.began_s = self._events.now_s
            on_sent = partial(self._on_sent, peer, link)
            link.flow = self._network.move(self._engine, peer, link.jobs[0].size_bytes, on_sent)

    def _on_sent(self, peer: EngineKey, link: SendingLink) -> None:
        chunk, link.flow = link.jobs.pop(0), None
        self.num_sent_bytes += chunk.size_bytes
        self._meter.on_chunk_sent(peer[0], chunk.size_bytes, self._events.now_s - link.began_s, was_computed=True)
        if (other := self._peers(peer)) is not None:
            arrived = partial(other.on_chunk_received, chunk.transfer_id, len(chunk.block_ids))
            self._network.send(self._engine, peer, arrived)
        sending = self._sending.get(chunk.transfer_id)
        if sending is not None:
            sending.num_sent_bytes += chunk.size_bytes
            self._follow_sending(sending, sending.machine.on_chunk_sent())
        link.chunks.on_sent()
        if self._links.get(peer) is link:
            self._announce(peer, link)


def _key(address: EngineAddress) -> EngineKey:
    return address.engine_id, address.incarnation
