"""The producer's end of every transfer of this rank: holds a machine for each, and carries its instructions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kv_transfer.agent.early_ready import EarlyReadies
from kv_transfer.agent.link_meter import LinkMeter
from kv_transfer.agent.pinned_blocks import PinnedBlocks
from kv_transfer.agent.transfer_reports import TransferReports
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.fetches import Fetch, WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import FailedSending, FetchWanted, FinishedSending, ReadyToPrefill
from kv_transfer.connector.steps import ProducerEnd, ProducerFinish
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.chunk_queue import ChunkQueue, QueuedChunk
from kv_transfer.handoff.control_messages import Cancel, Chunk, ChunkSum, Finished, Ready
from kv_transfer.handoff.instructions import (
    DropQueued,
    Instruction,
    ReportFailedSending,
    ReportFinishedSending,
    ReportReady,
    Send,
    SendBlocks,
)
from kv_transfer.handoff.producer_machine import ProducerMachine, ProducerState
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob
from kv_transfer.params import EngineAddress, KVTransferParams, TransferId
from kv_transfer.transports.base import ComputeEvent


@dataclass(slots=True)
class _Producing:
    """A transfer under way.

    peer:     (engine_id, incarnation) of the consumer that the ticket names
    link:     the link on which READY came; None before
    computed: the point on the device's compute stream at which the latest progress is computed; None on the CPU
    num_promised_bytes: all that the transfer may move; before READY as if the consumer had no part of the prompt
    num_queued_bytes, num_sent_bytes: of the chunks that were queued and not dropped, and of those that have left
    num_counted_bytes: what the meter counts as queued for this transfer
    """

    key: TransferKey
    peer: tuple[str, int]
    machine: ProducerMachine
    link: PeerLink | None = None
    computed: ComputeEvent | None = None
    num_promised_bytes: int = 0
    num_queued_bytes: int = 0
    num_sent_bytes: int = 0
    num_counted_bytes: int = 0

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes to be sent yet: all of the transfer while it goes on, and what is queued once it has ended."""
        goes_on = self.machine.state in {ProducerState.AWAITING_READY, ProducerState.SENDING}
        return max(0, (self.num_promised_bytes if goes_on else self.num_queued_bytes) - self.num_sent_bytes)


class ProducerTransfers:
    """The transfers that this rank sends, by transfer id. The object belongs to the agent's thread.

    Invariants: a transfer is here from begin() until its FinishedSending is reported; from READY on it counts in its
    link's num_transfers and pins its blocks. The transfer of every queued chunk is here.
    """

    def __init__(self, config: KVTransferConfig, layout: KVCacheLayout, reports: TransferReports) -> None:
        """layout: of this rank's KV cache"""
        self._config = config
        self._layout = layout
        self._reports = reports
        self._producing: dict[TransferId, _Producing] = {}
        self._transfer_of_key: dict[TransferKey, TransferId] = {}
        self._queues: dict[PeerLink, ChunkQueue] = {}
        """The queues of the links on which chunks have been queued."""
        self._early = EarlyReadies(config.ready_timeout_s)
        self._duplicates: set[TransferKey] = set()
        """Requests whose ticket names another request's transfer: they have failed, and have not ended yet."""
        self._breaches: list[tuple[PeerLink, ProtocolViolation]] = []
        self.pins = PinnedBlocks()
        self.meter = LinkMeter()

    def __len__(self) -> int:
        return len(self._producing)

    # -- what the scheduler asks for -----------------------------------------------------------------------------

    def begin(self, key: TransferKey, params: KVTransferParams, num_prompt_tokens: int, now_s: float) -> None:
        """Begin to wait for READY, which may have come already.

        If another request has the same transfer id, this one fails at once.
        """
        transfer_id = params.transfer_id
        if transfer_id in self._producing:
            self._duplicates.add(key)
            self._reports.add(FailedSending(key, f"{transfer_id}: another request has a transfer of this id"))
            return
        assert key not in self._transfer_of_key, f"a second transfer under one key: {key}"
        machine = ProducerMachine(
            transfer_id=transfer_id,
            attempt=params.attempt,
            num_prompt_tokens=num_prompt_tokens,
            block_size=self._layout.block_size,
            max_chunk_blocks=1,
            deadline_s=now_s + self._config.ready_timeout_s,
            content_hash=params.content_hash,
            num_state_blocks=self._layout.num_state_blocks if key.kind is TransferKind.HANDOFF else 0,
        )
        peer = (params.peer.engine_id, params.peer.incarnation)
        producing = self._producing[transfer_id] = _Producing(key, peer, machine)
        num_blocks = -(-num_prompt_tokens // self._layout.block_size) + machine.num_state_blocks
        producing.num_promised_bytes = num_blocks * self._layout.block_size_bytes
        self._count(producing)
        self._transfer_of_key[key] = transfer_id
        self._reports.count_begun(params.attempt)
        early = self._early.take(transfer_id)
        if early is not None:
            try:
                self._on_ready(producing, *early, now_s)
            except ProtocolViolation as error:
                self._breaches.append((early[0], error))

    def take_breaches(self) -> list[tuple[PeerLink, ProtocolViolation]]:
        """Remove and return the links whose early READY turned out to break the protocol when its request came."""
        breaches, self._breaches = self._breaches, []
        return breaches

    def on_finish(self, finish: ProducerFinish) -> None:
        """Note that a request has ended in the scheduler. Its blocks stay in use until FinishedSending is reported."""
        producing = self._of_key(finish.key)
        if finish.key in self._duplicates:
            self._duplicates.remove(finish.key)
            self._reports.add(FinishedSending(finish.key))
        elif producing is not None:
            self._follow(producing, producing.machine.on_finish(finish.end, finish.first_token_id))

    def on_progress(
        self, progress: Iterable[tuple[TransferKey, tuple[int, ...], int]], after: ComputeEvent | None
    ) -> None:
        """Queue the blocks that are computed once the device has passed `after`; None: they are computed now.

        progress: (key, block_ids, num_computed_tokens) of each request; unknown keys are ignored
        """
        for key, block_ids, num_computed_tokens in progress:
            producing = self._of_key(key)
            if producing is not None:
                producing.computed = after
                if producing.link is None or producing.link.pieces is None:
                    continue  # Nothing is sent before READY; the next progress report names all blocks again.
                self.pins.hold(producing.machine.transfer_id, len(block_ids))
                pieces = producing.link.pieces.ids(block_ids)
                self._follow(producing, producing.machine.on_computed(pieces, num_computed_tokens))

    def _of_key(self, key: TransferKey) -> _Producing | None:
        return self._producing.get(self._transfer_of_key.get(key, ""))

    # -- what consumers send -------------------------------------------------------------------------------------

    def on_message(self, link: PeerLink, message: Ready | Cancel, now_s: float) -> None:
        """Give a consumer's message to the transfer that it is about. Raises ProtocolViolation.

        A READY that comes before its request is kept until then; one that asks for a fetch is reported as well.
        """
        producing = self._producing.get(message.transfer_id)
        if producing is not None and producing.machine.attempt != message.attempt:
            self._reports.count_dropped("another attempt")
        elif isinstance(message, Ready):
            if producing is not None:
                self._on_ready(producing, link, message, now_s)
            elif not self._early.put(link, message, now_s):
                self._refuse(link, message)
            elif message.fetch is not None:
                self._reports.add(FetchWanted(_describe_want(link, message, message.fetch)))
        elif producing is not None:
            if producing.link is link:
                self._follow(producing, producing.machine.on_cancel("the consumer cancelled the transfer"))
            else:
                self._reports.count_dropped("cancel of another link's transfer")
        elif self._early.take(message.transfer_id, link) is not None:
            self._refuse(link, message)

    def _on_ready(self, producing: _Producing, link: PeerLink, message: Ready, now_s: float) -> None:
        if not link.is_usable:
            self._reports.count_dropped("message on a closed link")
        elif producing.peer != link.peer or producing.machine.attempt != message.attempt:
            self._reports.count_dropped("another incarnation or attempt")
            self._refuse(link, message)
        elif producing.link is not None:
            self._reports.count_dropped("duplicate")
        else:
            assert link.pieces is not None, "a producer's link is open from the start"
            producing.link = link
            link.num_transfers += 1
            self.pins.begin(message.transfer_id, now_s)
            machine, pieces = producing.machine, link.pieces
            machine.block_size = pieces.piece_tokens
            machine.max_chunk_blocks = max(1, self._config.max_chunk_bytes // pieces.piece_size_bytes)
            first_piece = message.first_block * pieces.peer_pieces_per_block
            num_pieces = -(-machine.num_prompt_tokens // pieces.piece_tokens) + machine.num_state_blocks - first_piece
            producing.num_promised_bytes = max(0, num_pieces) * pieces.piece_size_bytes
            self._follow(producing, machine.on_ready(msgspec.structs.replace(message, first_block=first_piece)))

    def _refuse(self, link: PeerLink, message: Ready | Cancel) -> None:
        reason = "the producer does not have the request"
        link.send(Finished(message.transfer_id, message.attempt, ProducerEnd.ABORTED, 0, None, reason))

    # -- what links and clocks do --------------------------------------------------------------------------------

    def on_chunk_sent(self, link: PeerLink, job: ChunkJob) -> None:
        """Count a chunk that a data thread has sent, and announce the next ones."""
        self.meter.on_chunk_sent(link.peer[0], job.num_bytes, job.moved_s, was_computed=job.was_computed)
        if job.checksum is not None:
            link.send(ChunkSum(job.transfer_id, job.attempt, job.index, job.checksum))
        producing = self._producing.get(job.transfer_id)
        if producing is not None:
            producing.num_sent_bytes += job.num_bytes
            self._follow(producing, producing.machine.on_chunk_sent())
        self._queues[link].on_sent()
        self._announce(link)

    def on_link_dead(self, link: PeerLink, reason: str) -> None:
        """Fail the link's transfers; its data thread has ended."""
        self._queues.pop(link, None)
        for producing in [p for p in self._producing.values() if p.link is link]:
            producing.num_queued_bytes = producing.num_sent_bytes
            self._follow(producing, producing.machine.on_link_lost(reason))

    def stories_on(self, link: PeerLink) -> list[str]:
        """Return the story of each of a link's transfers."""
        return [p.machine.tell() for p in self._producing.values() if p.link is link]

    def on_time(self, now_s: float) -> None:
        """Give up requests that wait too long for READY, and READY messages that wait too long for their request."""
        for producing in list(self._producing.values()):
            self._follow(producing, producing.machine.on_time(now_s))
        for link, message in self._early.expire(now_s):
            self._refuse(link, message)

    def deadlines(self) -> Iterable[float]:
        """Yield the monotonic times at which on_time() has to be called."""
        yield from (p.machine.deadline_s for p in self._producing.values() if p.machine.is_awaiting_ready)
        early = self._early.next_deadline()
        if early is not None:
            yield early

    # -- what machines instruct ----------------------------------------------------------------------------------

    def _follow(self, producing: _Producing, instructions: Sequence[Instruction]) -> None:
        machine, link, key = producing.machine, producing.link, producing.key
        for instruction in instructions:
            match instruction:
                case Send(message):
                    assert link is not None, "nothing is sent before READY"
                    link.send(message)
                case SendBlocks(first_block, block_ids):
                    self._queue_blocks(producing, first_block, block_ids)
                case DropQueued():
                    assert link is not None, "nothing is queued before READY"
                    producing.num_queued_bytes -= self._queues[link].drop(machine.transfer_id)
                case ReportReady():
                    self._reports.add(ReadyToPrefill(key))
                case ReportFailedSending(reason):
                    self._reports.count_failed(machine.failure)
                    self._reports.add(FailedSending(key, reason))
                case ReportFinishedSending():
                    self._reports.add(FinishedSending(key))
                    self._forget(producing)
                case _:
                    raise AssertionError(f"this is no instruction of a producer: {instruction}")
        if machine.transfer_id in self._producing:
            self._count(producing)

    def _count(self, producing: _Producing, num_bytes: int | None = None) -> None:
        """Bring the meter up to date. num_bytes: what is still to be sent; None: what the transfer itself says"""
        num_bytes = producing.num_unsent_bytes if num_bytes is None else num_bytes
        if num_bytes != producing.num_counted_bytes:
            name, rank = producing.peer[0], producing.key.part
            engine_id = name if rank is None else name.removesuffix(f"/{rank}")
            self.meter.queue(name, engine_id, num_bytes - producing.num_counted_bytes)
            producing.num_counted_bytes = num_bytes

    def _forget(self, producing: _Producing) -> None:
        transfer_id = producing.machine.transfer_id
        del self._producing[transfer_id]
        del self._transfer_of_key[producing.key]
        self.pins.end(transfer_id)
        self._count(producing, 0)
        if producing.link is not None:
            producing.link.num_transfers -= 1
        else:
            self._early.refuse_later(transfer_id)

    def _queue_blocks(self, producing: _Producing, first_block: int, block_ids: tuple[int, ...]) -> None:
        link, transfer_id = producing.link, producing.machine.transfer_id
        assert link is not None, "nothing is sent before READY"
        assert link.pieces is not None, "a producer's link is open from the start"
        if link not in self._queues:
            self._queues[link] = ChunkQueue(self._config.max_chunk_bytes)
        size_bytes = len(block_ids) * link.pieces.piece_size_bytes
        producing.num_queued_bytes += size_bytes
        self._queues[link].put(QueuedChunk(transfer_id, first_block, block_ids, size_bytes, producing.computed))
        self._announce(link)

    def _announce(self, link: PeerLink) -> None:
        """Announce the chunks whose turn has come and give them to the data thread; none on a closing link."""
        assert link.data is not None, "a producer's link is open from the start"
        while link.is_usable and (chunk := self._queues[link].take()) is not None:
            machine = self._producing[chunk.transfer_id].machine
            index = machine.num_announced_chunks
            machine.on_chunk_announced()
            link.send(Chunk(machine.transfer_id, machine.attempt, chunk.first_block, len(chunk.block_ids)))
            link.data.put(link.make_job(machine.transfer_id, machine.attempt, index, chunk.block_ids, chunk.after))


def _describe_want(link: PeerLink, message: Ready, fetch: Fetch) -> WantedFetch:
    # A producer neither knows nor needs its consumer's addresses, because consumers connect to producers.
    assert link.pieces is not None, "a producer's link is open from the start"
    further = ("",) * (link.pieces.peer_tp_size - 1)
    peer = EngineAddress(link.peer[0], link.peer[1], "", further)
    return WantedFetch(message.attempt, peer, fetch)
