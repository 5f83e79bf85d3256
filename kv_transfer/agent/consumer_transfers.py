"""The consumer's end of every transfer of this rank: holds a machine for each, and carries its instructions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.agent.pinned_blocks import PinnedBlocks
from kv_transfer.agent.transfer_reports import TransferReports
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import FinishedReceiving, LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import Reservation
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.consumer_machine import ConsumerMachine
from kv_transfer.handoff.control_messages import Chunk, ChunkSum, Finished
from kv_transfer.handoff.instructions import Instruction, ReceiveBlocks, ReportReceived, Send
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.checksum import ComparedChunks
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob
from kv_transfer.params import TransferId
from kv_transfer.transfer_stats import TransferFailure
from kv_transfer.transports.base import ComputeEvent


@dataclass(slots=True)
class _Consuming:
    """A load under way.

    vacated: the point on the device's compute stream after the last use of the load's blocks by the requests that had
             them before; None on the CPU
    """

    key: TransferKey
    machine: ConsumerMachine
    link: PeerLink
    vacated: ComputeEvent | None


class ConsumerTransfers:
    """The loads of this rank, by transfer id. The object belongs to the agent's thread.

    Invariants: a load is here from begin() until its one report; it pins its blocks and counts in its link's
    num_transfers for just as long. A chunk for a load that is not here breaks the protocol.
    """

    def __init__(self, config: KVTransferConfig, layout: KVCacheLayout, reports: TransferReports) -> None:
        self._config = config
        self._layout = layout
        self._reports = reports
        self._consuming: dict[TransferId, _Consuming] = {}
        self._transfer_of_key: dict[TransferKey, TransferId] = {}
        self._compared: dict[PeerLink, ComparedChunks] = {}
        """The chunks whose checksums are to be compared, of links with checksums."""
        self.pins = PinnedBlocks()

    def __len__(self) -> int:
        return len(self._consuming)

    # -- what the scheduler asks for -----------------------------------------------------------------------------

    def begin(self, reservation: Reservation, link: PeerLink, now_s: float, vacated: ComputeEvent | None) -> None:
        """Begin a load whose blocks are reserved: send READY, once the link is open.

        vacated: see _Consuming. If another load has the same transfer id, this one fails at once.
        """
        params = reservation.params
        transfer_id = params.transfer_id
        if transfer_id in self._consuming:
            num_local_tokens = min(
                reservation.num_local_blocks * self._layout.block_size, reservation.num_prompt_tokens
            )
            reason = f"{transfer_id}: another request has a transfer of this id"
            failed = ReceivedKV(LoadOutcome.FAILED, num_local_tokens, reason=reason)
            self._reports.count_received(failed, TransferFailure.REPEATED_ID)
            self._reports.add(FinishedReceiving(reservation.key, failed))
            return
        assert reservation.key not in self._transfer_of_key, f"a second load under one key: {reservation.key}"
        machine = ConsumerMachine(
            transfer_id=transfer_id,
            attempt=params.attempt,
            block_ids=reservation.block_ids,
            num_local_blocks=reservation.num_local_blocks,
            num_prompt_tokens=reservation.num_prompt_tokens,
            block_size=self._layout.block_size,
            block_size_bytes=self._layout.block_size_bytes,
            drain_timeout_s=self._config.chunk_timeout_s,
            fetch=reservation.fetch,
            content_hash=params.content_hash,
            num_state_blocks=self._layout.num_state_blocks if reservation.fetch is None else 0,
        )
        consuming = self._consuming[transfer_id] = _Consuming(reservation.key, machine, link, vacated)
        self._transfer_of_key[reservation.key] = transfer_id
        self._reports.count_begun(params.attempt)
        link.num_transfers += 1
        link.last_active_s = now_s
        self.pins.begin(transfer_id, now_s)
        self.pins.hold(transfer_id, len(reservation.block_ids))
        self._follow(consuming, machine.start())

    def on_cancel(self, key: TransferKey, now_s: float) -> None:
        """Cancel a load. Unknown keys are ignored: the load's report may be on its way."""
        consuming = self._consuming.get(self._transfer_of_key.get(key, ""))
        if consuming is None:
            return
        instructions = consuming.machine.on_cancel(now_s)
        if consuming.link.withdraw(consuming.machine.transfer_id):
            # The link is not open yet, so READY was not sent: no KV will come, and the producer does not know of this
            # load.
            instructions = consuming.machine.on_link_lost("the load was cancelled before READY was sent")
        self._follow(consuming, instructions)

    # -- what producers send -------------------------------------------------------------------------------------

    def on_message(self, link: PeerLink, message: Chunk | ChunkSum | Finished, now_s: float) -> None:
        """Give a producer's message to the load that it is about.

        Raises ProtocolViolation if the load's state does not allow the message, or if no such load is here: the bytes
        of a chunk could be received nowhere. A FINISHED for a load that is not here is only counted.
        """
        consuming = self._consuming.get(message.transfer_id)
        is_ours = consuming is not None and consuming.link is link and consuming.machine.attempt == message.attempt
        if consuming is None or not is_ours:
            if not isinstance(message, Finished):
                raise ProtocolViolation(
                    f"{message.transfer_id}: the producer announced a chunk of a transfer that is not under way here"
                )
            self._reports.count_dropped("unknown transfer")
            return
        match message:
            case Chunk():
                assert link.pieces is not None, "chunks come on open links"
                consuming.machine.use_pieces(link.pieces)
                self._follow(consuming, consuming.machine.on_chunk(message, now_s))
            case ChunkSum():
                if not self._config.checksum:
                    raise ProtocolViolation(
                        f"{message.transfer_id}: the producer sent a checksum, but this link has none"
                    )
                self._compared_on(link).add_word(message)
                self._compare(link, now_s)
            case Finished():
                self._follow(consuming, consuming.machine.on_finished(message, now_s))

    # -- what links and clocks do --------------------------------------------------------------------------------

    def on_chunk_received(self, link: PeerLink, job: ChunkJob, now_s: float) -> None:
        """Count a chunk that a data thread has received, on a link with checksums once the checksums are compared.

        Raises ProtocolViolation.
        """
        if job.checksum is None:
            self._count_chunk(job, now_s, is_intact=True)
            return
        self._compared_on(link).add_job(job)
        self._compare(link, now_s)

    def on_link_dead(self, link: PeerLink, reason: str) -> None:
        """Fail the link's loads; its data thread has ended. Chunks whose checksum was not confirmed are zeroed."""
        for job in self._compared.pop(link, ComparedChunks()).take_unsure():
            job.wipe()
        for consuming in [c for c in self._consuming.values() if c.link is link]:
            self._follow(consuming, consuming.machine.on_link_lost(reason))

    def stories_on(self, link: PeerLink) -> list[str]:
        """Return the story of each of a link's loads."""
        return [c.machine.tell() for c in self._consuming.values() if c.link is link]

    def overdue(self, now_s: float) -> list[PeerLink]:
        """Return the links on which a cancel was not answered in time."""
        return [consuming.link for consuming in self._draining() if consuming.machine.is_overdue(now_s)]

    def deadlines(self) -> Iterable[float]:
        """Return the monotonic times at which overdue() has to be called."""
        return (c.machine.deadline_s for c in self._draining() if c.machine.deadline_s is not None)

    def _draining(self) -> list[_Consuming]:
        """Return the cancelled loads that wait for an answer.

        Loads on a closing link are left out: they wait for the end of its data thread, which no deadline hastens.
        """
        return [c for c in self._consuming.values() if c.machine.deadline_s is not None and c.link.is_usable]

    def _compared_on(self, link: PeerLink) -> ComparedChunks:
        return self._compared.setdefault(link, ComparedChunks())

    def _compare(self, link: PeerLink, now_s: float) -> None:
        while (compared := self._compared_on(link).take()) is not None:
            job, is_intact = compared
            if not is_intact:
                self._reports.stats.num_corrupt_chunks += 1
                job.wipe()
            self._count_chunk(job, now_s, is_intact=is_intact)

    def _count_chunk(self, job: ChunkJob, now_s: float, *, is_intact: bool) -> None:
        consuming = self._consuming.get(job.transfer_id)
        if consuming is not None:
            machine = consuming.machine
            self._follow(consuming, machine.on_chunk_received(job.num_blocks, now_s, is_intact=is_intact))

    # -- what machines instruct ----------------------------------------------------------------------------------

    def _follow(self, consuming: _Consuming, instructions: Sequence[Instruction]) -> None:
        machine, link = consuming.machine, consuming.link
        for instruction in instructions:
            match instruction:
                case Send(message):
                    link.send(message)
                case ReceiveBlocks(block_ids):
                    assert link.data is not None, "chunks come on open links"
                    index = machine.num_announced_chunks - 1
                    job = link.make_job(machine.transfer_id, machine.attempt, index, block_ids, consuming.vacated)
                    link.data.put(job)
                case ReportReceived(received):
                    self._reports.count_received(received, machine.failure)
                    self._reports.add(FinishedReceiving(consuming.key, received))
                    self._forget(consuming)
                case _:
                    raise AssertionError(f"this is no instruction of a consumer: {instruction}")

    def _forget(self, consuming: _Consuming) -> None:
        transfer_id = consuming.machine.transfer_id
        del self._consuming[transfer_id]
        del self._transfer_of_key[consuming.key]
        self.pins.end(transfer_id)
        consuming.link.num_transfers -= 1
