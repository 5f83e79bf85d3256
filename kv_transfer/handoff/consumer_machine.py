"""The consumer's end of one transfer. See instructions.py for the protocol.

It is over with its one report: when FINISHED is in and as many chunks as it says have been received, or the link is
dead. Chunks are owed until FINISHED is in and so many have been announced; a second FINISHED takes owed ones back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.block_pieces import PieceMap
from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import Cancel, Chunk, Finished, Ready
from kv_transfer.handoff.instructions import Instruction, ReceiveBlocks, ReportReceived, Send
from kv_transfer.transfer_stats import TransferTimings


@dataclass(slots=True)
class ConsumerMachine:
    """block_ids: the prompt's, those included that are already here. drain_timeout_s: for the answer to a cancel."""

    transfer_id: str
    attempt: int
    block_ids: tuple[int, ...]
    num_local_blocks: int
    num_prompt_tokens: int
    block_size: int
    block_size_bytes: int
    drain_timeout_s: float
    fetch: Fetch | None = None
    content_hash: bytes = b""
    is_over: bool = False
    deadline_s: float | None = None
    """Monotonic. Set by a cancel: while chunks are owed by then the link is stuck and has to be closed."""
    num_announced_chunks: int = 0
    _num_announced_blocks: int = 0
    _num_valid_blocks: int = 0
    _num_received_chunks: int = 0
    _corrupt_chunk: int | None = None
    """The first of them. Nothing from it on is valid; everything from it on is still received."""
    _finished: Finished | None = None
    _is_cancelled: bool = False
    _first_chunk_s: float | None = None
    _prefill_finished_s: float | None = None
    _is_in_pieces: bool = False

    def start(self) -> list[Instruction]:
        """The blocks are reserved: tell the producer."""
        ready = Ready(
            self.transfer_id,
            self.attempt,
            self.num_local_blocks,
            self.num_prompt_tokens,
            self.fetch,
            self.content_hash,
        )
        return [Send(ready)]

    def use_pieces(self, pieces: PieceMap) -> None:
        """From now on, a block is a piece: what chunks count. Before any other word of a chunk; once is enough."""
        if not self._is_in_pieces:
            self._is_in_pieces = True
            self.block_ids = pieces.ids(self.block_ids)
            self.num_local_blocks *= pieces.pieces_per_block
            self.block_size, self.block_size_bytes = pieces.piece_tokens, pieces.piece_size_bytes

    def on_chunk(self, message: Chunk, now_s: float) -> list[Instruction]:
        """Blocks were announced: receive them. Raises ProtocolViolation if they are not the next ones."""
        first = self.num_local_blocks + self._num_announced_blocks
        stop = first + message.num_blocks
        is_next = message.first_block == first and message.num_blocks >= 1 and stop <= len(self.block_ids)
        if not (is_next and self._is_owed_chunks):
            raise ProtocolViolation(
                f"{self.transfer_id}: blocks {message.first_block} to {message.first_block + message.num_blocks} "
                f"announced, expected from {first} on, of {len(self.block_ids)}"
            )
        if self._first_chunk_s is None:
            self._first_chunk_s = now_s
        self._num_announced_blocks += message.num_blocks
        self.num_announced_chunks += 1
        self._end_wait()
        return [ReceiveBlocks(self.block_ids[first:stop])]

    def on_chunk_received(self, num_blocks: int, now_s: float, *, is_intact: bool = True) -> list[Instruction]:
        """The oldest outstanding chunk is in."""
        if self._corrupt_chunk is None and not is_intact:
            self._corrupt_chunk = self._num_received_chunks
        if self._corrupt_chunk is None:
            self._num_valid_blocks += num_blocks
        self._num_received_chunks += 1
        return self._report_if_complete(now_s)

    def on_finished(self, message: Finished, now_s: float) -> list[Instruction]:
        """So many chunks in all, of which some may be announced later. Raises ProtocolViolation if more were."""
        if not self._is_owed_chunks:
            return []
        if message.num_chunks < self.num_announced_chunks:
            raise ProtocolViolation(
                f"{self.transfer_id}: {message.num_chunks} chunks at the end, {self.num_announced_chunks} announced"
            )
        if self._finished is None:
            self._prefill_finished_s = now_s
        self._finished = message
        self._end_wait()
        return self._report_if_complete(now_s)

    def on_cancel(self, now_s: float) -> list[Instruction]:
        """The load is not wanted any more: say so, and keep receiving what was announced."""
        if self._is_cancelled or self.is_over:
            return []
        self._is_cancelled = True
        if not self._is_owed_chunks:
            return []
        self.deadline_s = now_s + self.drain_timeout_s
        return [Send(Cancel(self.transfer_id, self.attempt))]

    def on_link_lost(self, reason: str) -> list[Instruction]:
        """The link is dead: what is here is here, and nothing more will be written."""
        if self.is_over:
            return []
        outcome = LoadOutcome.CANCELLED if self._is_cancelled else LoadOutcome.FAILED
        return self._report(ReceivedKV(outcome, self.num_valid_tokens, reason=reason))

    def is_overdue(self, now_s: float) -> bool:
        """Whether the producer has not answered a cancel in time."""
        return self.deadline_s is not None and self.deadline_s <= now_s

    @property
    def _is_owed_chunks(self) -> bool:
        """Whether the producer may announce more."""
        return self._finished is None or self.num_announced_chunks < self._finished.num_chunks

    def _end_wait(self) -> None:
        if not self._is_owed_chunks:
            self.deadline_s = None

    @property
    def num_valid_tokens(self) -> int:
        """Chunks come in order, so what has been received intact is a prefix."""
        num_blocks = self.num_local_blocks + self._num_valid_blocks
        return min(num_blocks * self.block_size, self.num_prompt_tokens)

    def _report_if_complete(self, now_s: float) -> list[Instruction]:
        finished = self._finished
        if self.is_over or finished is None or self._num_received_chunks < finished.num_chunks:
            return []
        num_valid_tokens, timings = self.num_valid_tokens, self._timings(now_s)
        if self._is_cancelled:
            received = ReceivedKV(LoadOutcome.CANCELLED, num_valid_tokens, timings=timings)
        elif finished.end is ProducerEnd.FINISHED_HERE:
            received = ReceivedKV(LoadOutcome.RELEASED, num_valid_tokens, timings=timings)
        elif self._corrupt_chunk is not None:
            reason = f"{self.transfer_id}: chunk {self._corrupt_chunk} was corrupted on its way"
            received = ReceivedKV(LoadOutcome.FAILED, num_valid_tokens, reason=reason, timings=timings)
        elif finished.end is ProducerEnd.ABORTED:
            reason = finished.reason or "the producer gave the request up"
            received = ReceivedKV(LoadOutcome.FAILED, num_valid_tokens, reason=reason, timings=timings)
        elif finished.end is ProducerEnd.PREFIX_SENT:
            received = ReceivedKV(LoadOutcome.LOADED, num_valid_tokens, timings=timings)
        elif num_valid_tokens < self.num_prompt_tokens:
            raise ProtocolViolation(
                f"{self.transfer_id}: handed over with {num_valid_tokens} of {self.num_prompt_tokens} tokens' KV"
            )
        else:
            token_id = finished.first_token_id
            received = ReceivedKV(LoadOutcome.LOADED, num_valid_tokens, first_token_id=token_id, timings=timings)
        return self._report(received)

    def _report(self, received: ReceivedKV) -> list[Instruction]:
        self.is_over = True
        self.deadline_s = None
        return [ReportReceived(received)]

    def _timings(self, now_s: float) -> TransferTimings:
        assert self._prefill_finished_s is not None, "timings are for a transfer whose producer has finished"
        has_chunks = self._first_chunk_s is not None
        return TransferTimings(
            num_blocks=self._num_valid_blocks,
            num_bytes=self._num_valid_blocks * self.block_size_bytes,
            num_chunks=self._num_received_chunks,
            transfer_s=now_s - self._first_chunk_s if self._first_chunk_s is not None else 0.0,
            exposed_s=now_s - self._prefill_finished_s if has_chunks else 0.0,
        )
