"""Every transfer of this engine: machines by transfer id, their instructions carried out, their reports collected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kv_transfer.chunk_queue import ChunkQueue, QueuedChunk
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector import (
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOutcome,
    ProducerEnd,
    ProducerProgress,
    Reservation,
)
from kv_transfer.consumer import ConsumerTransfer
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff import (
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
from kv_transfer.layout import KVCacheLayout
from kv_transfer.link import ChunkJob
from kv_transfer.links import LinkTable
from kv_transfer.params import KVTransferParams
from kv_transfer.parked import ParkedMessages
from kv_transfer.peer_link import PeerLink
from kv_transfer.producer import ProducerTransfer
from kv_transfer.stats import TransferStats
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.wire import Cancel, Chunk, Finished, Ready


@dataclass(slots=True)
class _Producing:
    """computed: on a device, where its latest progress is done."""

    request_id: str
    peer: tuple[str, int]
    machine: ProducerTransfer
    link: PeerLink | None = None
    computed: ComputeEvent | None = None


@dataclass(slots=True)
class _Consuming:
    """vacated: on a device, where the last use of its blocks by those who had them before is over."""

    request_id: str
    machine: ConsumerTransfer
    link: PeerLink
    vacated: ComputeEvent | None


class TransferTable:
    """Belongs to the agent's thread."""

    def __init__(self, config: KVTransferConfig, layout: KVCacheLayout, links: LinkTable) -> None:
        self._config = config
        self._layout = layout
        self._links = links
        self._producing: dict[str, _Producing] = {}
        self._consuming: dict[str, _Consuming] = {}
        self._queues: dict[PeerLink, ChunkQueue] = {}
        """Of links on which chunks have been sent. A queued chunk's transfer is in _producing."""
        self._transfer_of_request: dict[str, str] = {}
        self._parked = ParkedMessages(config.ready_timeout_s)
        self.output = KVConnectorOutput()
        self.stats = TransferStats()

    def take_output(self, num_links: int) -> KVConnectorOutput:
        """What happened since the last call, with a copy of the counters."""
        output, self.output = self.output, KVConnectorOutput()
        num_active = len(self._producing) + len(self._consuming)
        output.stats = replace(
            self.stats,
            num_links=num_links,
            num_links_lost=self._links.num_lost,
            num_active_transfers=num_active,
            dropped_messages=dict(self.stats.dropped_messages),
        )
        return output

    def count_dropped(self, reason: str) -> None:
        """A message was dropped."""
        self.stats.dropped_messages[reason] = self.stats.dropped_messages.get(reason, 0) + 1

    # -- what the scheduler asks for -----------------------------------------------------------------------------

    def on_step(self, metadata: KVConnectorMetadata, now_s: float, after: ComputeEvent | None = None) -> None:
        """Before a forward. after: on a device, where what was computed so far is done.

        A finish comes after the progress of the step that finished it: the steps' order holds.
        """
        for request_id, params, num_prompt_tokens in metadata.new_producers:
            self._begin_producing(request_id, params, num_prompt_tokens, now_s)
        for reservation in metadata.reservations:
            self._begin_consuming(reservation, after)
        for finish in metadata.producer_finishes:
            producing = self._producing.get(self._transfer_of_request.get(finish.request_id, ""))
            if producing is not None:
                self._follow_producer(producing, producing.machine.on_finish(finish.end, finish.first_token_id))
        for request_id in metadata.consumer_cancels:
            consuming = self._consuming.get(self._transfer_of_request.get(request_id, ""))
            if consuming is not None:
                self._follow_consumer(consuming, consuming.machine.on_cancel(now_s))
        # What the prefix cache holds leaves before this step's forward computes the rest.
        cached = ((p.request_id, p.block_ids, p.num_computed_tokens_before) for p in metadata.progress)
        self._on_progress(cached, after)

    def on_computed(self, progress: Iterable[ProducerProgress], after: ComputeEvent | None = None) -> None:
        """After a forward, which the device has done when it has passed `after`."""
        self._on_progress(((p.request_id, p.block_ids, p.num_computed_tokens_after) for p in progress), after)

    def _on_progress(self, progress: Iterable[tuple[str, tuple[int, ...], int]], after: ComputeEvent | None) -> None:
        for request_id, block_ids, num_computed_tokens in progress:
            producing = self._producing.get(self._transfer_of_request.get(request_id, ""))
            if producing is not None:
                producing.computed = after
                if producing.link is None or producing.link.pieces is None:
                    continue  # Before READY nothing leaves, and nothing is to be remembered.
                pieces = producing.link.pieces.ids(block_ids)
                self._follow_producer(producing, producing.machine.on_computed(pieces, num_computed_tokens))

    def _begin_producing(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int, now_s: float) -> None:
        machine = ProducerTransfer(
            transfer_id=params.transfer_id,
            attempt=params.attempt,
            num_prompt_tokens=num_prompt_tokens,
            block_size=self._layout.block_size,
            max_chunk_blocks=1,
            deadline_s=now_s + self._config.ready_timeout_s,
        )
        peer = (params.peer.engine_id, params.peer.incarnation)
        producing = self._producing[params.transfer_id] = _Producing(request_id, peer, machine)
        self._transfer_of_request[request_id] = params.transfer_id
        parked = self._parked.take(params.transfer_id)
        if parked is not None:
            self._on_ready(producing, *parked)

    def _begin_consuming(self, reservation: Reservation, vacated: ComputeEvent | None) -> None:
        params = reservation.params
        machine = ConsumerTransfer(
            transfer_id=params.transfer_id,
            attempt=params.attempt,
            block_ids=reservation.block_ids,
            num_local_blocks=reservation.num_local_blocks,
            num_prompt_tokens=reservation.num_prompt_tokens,
            block_size=self._layout.block_size,
            block_size_bytes=self._layout.block_size_bytes,
            drain_timeout_s=self._config.chunk_timeout_s,
        )
        link = self._links.to_producer(params.peer)
        consuming = self._consuming[params.transfer_id] = _Consuming(reservation.request_id, machine, link, vacated)
        self._transfer_of_request[reservation.request_id] = params.transfer_id
        self._follow_consumer(consuming, machine.start())

    # -- what peers say ------------------------------------------------------------------------------------------

    def on_consumer_message(self, link: PeerLink, message: Ready | Cancel, now_s: float) -> None:
        """READY may come before our own request does: it is parked. Raises ProtocolViolation."""
        producing = self._producing.get(message.transfer_id)
        if producing is not None and producing.machine.attempt != message.attempt:
            self.count_dropped("another attempt")
        elif isinstance(message, Ready):
            if producing is not None:
                self._on_ready(producing, link, message)
            elif not self._parked.put(link, message, now_s):
                self._refuse(link, message)
        elif producing is not None:
            self._follow_producer(producing, producing.machine.on_cancel("the consumer let the request go"))
        elif self._parked.take(message.transfer_id) is not None:
            self._refuse(link, message)

    def _on_ready(self, producing: _Producing, link: PeerLink, message: Ready) -> None:
        if not link.is_usable:
            self.count_dropped("message on a closed link")
        elif producing.peer != link.peer or producing.machine.attempt != message.attempt:
            self.count_dropped("another incarnation or attempt")
            self._refuse(link, message)
        else:
            assert link.pieces is not None, "a producer's link is open from the start"
            producing.link = link
            producing.machine.block_size = link.pieces.piece_tokens
            producing.machine.max_chunk_blocks = max(1, self._config.max_chunk_bytes // link.pieces.piece_size_bytes)
            first_piece = message.first_block * link.pieces.peer_pieces_per_block
            self._follow_producer(
                producing, producing.machine.on_ready(msgspec.structs.replace(message, first_block=first_piece))
            )

    def _refuse(self, link: PeerLink, message: Ready | Cancel) -> None:
        reason = "the producer does not have the request"
        link.say(Finished(message.transfer_id, message.attempt, ProducerEnd.ABORTED, 0, None, reason))

    def on_producer_message(self, link: PeerLink, message: Chunk | Finished, now_s: float) -> None:
        """Raises ProtocolViolation for a chunk of no transfer: its bytes would have nowhere to go."""
        consuming = self._consuming.get(message.transfer_id)
        is_ours = consuming is not None and consuming.link is link and consuming.machine.attempt == message.attempt
        if consuming is None or not is_ours:
            if isinstance(message, Chunk):
                raise ProtocolViolation(f"a chunk of {message.transfer_id}, which is not in transfer here")
            self.count_dropped("unknown transfer")
        elif isinstance(message, Chunk):
            assert link.pieces is not None, "chunks come on open links"
            consuming.machine.use_pieces(link.pieces)
            self._follow_consumer(consuming, consuming.machine.on_chunk(message, now_s))
        else:
            self._follow_consumer(consuming, consuming.machine.on_finished(message, now_s))

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob, now_s: float) -> None:
        """A data thread moved a chunk. Raises ProtocolViolation."""
        num_blocks = len(job.blocks)
        num_bytes = sum(block.nbytes for block in job.blocks)
        if link.is_producer:
            self.stats.num_sent_chunks += 1
            self.stats.num_sent_blocks += num_blocks
            self.stats.num_sent_bytes += num_bytes
            producing = self._producing.get(job.transfer_id)
            if producing is not None:
                self._follow_producer(producing, producing.machine.on_chunk_sent())
            self._queues[link].on_sent()
            self._announce(link)
            return
        self.stats.num_received_chunks += 1
        self.stats.num_received_blocks += num_blocks
        self.stats.num_received_bytes += num_bytes
        consuming = self._consuming.get(job.transfer_id)
        if consuming is not None:
            self._follow_consumer(consuming, consuming.machine.on_chunk_received(num_blocks, now_s))

    # -- what goes wrong -----------------------------------------------------------------------------------------

    def on_link_dead(self, link: PeerLink) -> None:
        """The link's data thread has ended: its transfers fail."""
        reason = f"link with {link.peer[0]} lost: {link.reason}"
        self._queues.pop(link, None)
        for producing in [p for p in self._producing.values() if p.link is link]:
            self._follow_producer(producing, producing.machine.on_link_lost(reason))
        for consuming in [c for c in self._consuming.values() if c.link is link]:
            self._follow_consumer(consuming, consuming.machine.on_link_lost(reason))

    def on_time(self, now_s: float) -> list[PeerLink]:
        """Apply deadlines; returns the links that are stuck."""
        for producing in list(self._producing.values()):
            self._follow_producer(producing, producing.machine.on_time(now_s))
        for link, message in self._parked.expire(now_s):
            self._refuse(link, message)
        return [consuming.link for consuming in self._draining() if consuming.machine.is_overdue(now_s)]

    def next_deadline(self) -> float | None:
        """Monotonic time of the first deadline of any transfer."""
        waiting = (p.machine.deadline_s for p in self._producing.values() if p.machine.is_awaiting_ready)
        draining = (c.machine.deadline_s for c in self._draining() if c.machine.deadline_s is not None)
        parked = self._parked.next_deadline()
        return min([*waiting, *draining, *([parked] if parked is not None else [])], default=None)

    def _draining(self) -> list[_Consuming]:
        """Cancelled loads. On a closing link the end of its data thread is awaited, which no deadline brings nearer."""
        return [c for c in self._consuming.values() if c.machine.deadline_s is not None and c.link.is_usable]

    # -- what machines say ---------------------------------------------------------------------------------------

    def _follow_producer(self, producing: _Producing, instructions: Sequence[Instruction]) -> None:
        machine, link, request_id = producing.machine, producing.link, producing.request_id
        for instruction in instructions:
            match instruction:
                case Send(message):
                    assert link is not None, "nothing is said before READY"
                    link.say(message)
                case SendBlocks(first_block, block_ids):
                    self._queue_blocks(producing, first_block, block_ids)
                case DropQueued():
                    assert link is not None, "nothing is queued before READY"
                    self._queues[link].drop(machine.transfer_id)
                case ReportReady():
                    self.output.ready_to_prefill.add(request_id)
                case ReportFailedSending(reason):
                    self.stats.num_transfers_failed += 1
                    self.output.failed_sending[request_id] = reason
                case ReportFinishedSending():
                    self.output.finished_sending.add(request_id)
                    del self._producing[machine.transfer_id]
                    del self._transfer_of_request[request_id]
                    if link is None:
                        self._parked.refuse_later(machine.transfer_id)
                case _:
                    raise AssertionError(f"not a producer's: {instruction}")

    def _queue_blocks(self, producing: _Producing, first_block: int, block_ids: tuple[int, ...]) -> None:
        link, transfer_id = producing.link, producing.machine.transfer_id
        assert link is not None, "nothing is sent before READY"
        assert link.pieces is not None, "a producer's link is open from the start"
        if link not in self._queues:
            self._queues[link] = ChunkQueue(self._config.max_chunk_bytes)
        size_bytes = len(block_ids) * link.pieces.piece_size_bytes
        self._queues[link].put(QueuedChunk(transfer_id, first_block, block_ids, size_bytes, producing.computed))
        self._announce(link)

    def _announce(self, link: PeerLink) -> None:
        """Announce what it is time for, and give it to the data thread. A closing link announces nothing more."""
        assert link.data is not None, "a producer's link is open from the start"
        while link.is_usable and (chunk := self._queues[link].take()) is not None:
            machine = self._producing[chunk.transfer_id].machine
            machine.on_chunk_announced()
            link.say(Chunk(machine.transfer_id, machine.attempt, chunk.first_block, len(chunk.block_ids)))
            link.data.put(_make_job(link, machine.transfer_id, chunk.block_ids, chunk.after))

    def _follow_consumer(self, consuming: _Consuming, instructions: Sequence[Instruction]) -> None:
        machine, link = consuming.machine, consuming.link
        for instruction in instructions:
            match instruction:
                case Send(message):
                    link.say(message)
                case ReceiveBlocks(block_ids):
                    assert link.data is not None, "chunks come on open links"
                    link.data.put(_make_job(link, machine.transfer_id, block_ids, consuming.vacated))
                case ReportReceived(received):
                    self._count_outcome(received.outcome)
                    self.output.finished_recving[consuming.request_id] = received
                    del self._consuming[machine.transfer_id]
                    del self._transfer_of_request[consuming.request_id]
                case _:
                    raise AssertionError(f"not a consumer's: {instruction}")

    def _count_outcome(self, outcome: LoadOutcome) -> None:
        if outcome is LoadOutcome.FAILED:
            self.stats.num_transfers_failed += 1
        elif outcome is LoadOutcome.CANCELLED:
            self.stats.num_transfers_cancelled += 1
        else:
            self.stats.num_transfers_completed += 1


def _make_job(link: PeerLink, transfer_id: str, pieces: Sequence[int], after: ComputeEvent | None) -> ChunkJob:
    assert link.pieces is not None, "chunks move on open links"
    messages, staged = link.pieces.messages(pieces)
    return ChunkJob(transfer_id, messages, after, staged)
