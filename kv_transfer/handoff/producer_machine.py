"""The producer's end of one transfer. See instructions.py for the protocol.

AWAITING_READY -> SENDING -> (GIVEN_UP) -> OVER. The request's own end in the scheduler (on_finish) can come in any of
them; OVER is reached once it has come and every queued chunk has left, or the link is dead.

What is computed is queued in chunks; the link announces them when it is their turn (on_chunk_announced). FINISHED says
how many were queued, and need not wait for the last one's turn. Who lets go has the rest dropped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import Finished, Ready
from kv_transfer.handoff.instructions import (
    DropQueued,
    Instruction,
    ReportFailedSending,
    ReportFinishedSending,
    ReportReady,
    Send,
    SendBlocks,
)


class ProducerState(enum.Enum):
    """Where a producer's transfer is."""

    AWAITING_READY = enum.auto()
    SENDING = enum.auto()
    GIVEN_UP = enum.auto()
    """The consumer is gone or has let go: nothing more is announced; the scheduler was told."""
    OVER = enum.auto()


@dataclass(slots=True)
class ProducerMachine:
    """max_chunk_blocks: a chunk has no more. deadline_s: monotonic, for READY."""

    transfer_id: str
    attempt: int
    num_prompt_tokens: int
    block_size: int
    max_chunk_blocks: int
    deadline_s: float
    content_hash: bytes = b""
    state: ProducerState = ProducerState.AWAITING_READY
    num_announced_chunks: int = 0
    _num_queued_chunks: int = 0
    _num_sent_chunks: int = 0
    _next_block: int = 0
    _end: ProducerEnd | None = None
    _first_token_id: int | None = None
    _is_silent: bool = True
    """Nothing can, or need, be said to the consumer: before READY, after FINISHED, on a dead link."""
    _is_answered: bool = False
    """FINISHED was said, or the link is dead: no READY is owed an answer."""

    @property
    def is_awaiting_ready(self) -> bool:
        """Whether deadline_s counts."""
        return self.state is ProducerState.AWAITING_READY

    def on_ready(self, message: Ready) -> list[Instruction]:
        """The consumer has reserved its blocks. A second READY changes nothing. Raises ProtocolViolation."""
        if self.state is ProducerState.GIVEN_UP and not self._is_answered:
            # It came after its deadline: the consumer must not wait for what will never come.
            self._is_silent = False
            return self._say_finished(ProducerEnd.ABORTED, "READY came too late")
        if self.state is not ProducerState.AWAITING_READY:
            return []
        if message.num_prompt_tokens != self.num_prompt_tokens and message.fetch is None:
            raise ProtocolViolation(
                f"{self.transfer_id}: the consumer expects {message.num_prompt_tokens} prompt tokens, "
                f"the producer has {self.num_prompt_tokens}"
            )
        if message.content_hash and self.content_hash and message.content_hash != self.content_hash:
            raise ProtocolViolation(f"{self.transfer_id}: the two ends' tokens, adapters or images are not the same")
        self.state = ProducerState.SENDING
        self._is_silent = False
        self._next_block = message.first_block
        return [ReportReady()]

    def on_computed(self, block_ids: tuple[int, ...], num_computed_tokens: int) -> list[Instruction]:
        """KV is there for so many tokens: whole blocks may leave, and the last one once the prompt is through."""
        if self.state is not ProducerState.SENDING or self._end is not None:
            return []
        num_tokens = min(num_computed_tokens, self.num_prompt_tokens)
        is_through = num_tokens == self.num_prompt_tokens
        num_blocks = -(-num_tokens // self.block_size) if is_through else num_tokens // self.block_size
        if num_blocks <= self._next_block:
            return []
        starts = range(self._next_block, num_blocks, self.max_chunk_blocks)
        self._next_block = num_blocks
        self._num_queued_chunks += len(starts)
        return [SendBlocks(first, block_ids[first : min(first + starts.step, num_blocks)]) for first in starts]

    def on_finish(self, end: ProducerEnd, first_token_id: int | None) -> list[Instruction]:
        """The request has ended in the scheduler."""
        if self._end is not None:
            return []
        self._end, self._first_token_id = end, first_token_id
        # Only a consumer that goes on wants the rest.
        is_wanted = end in {ProducerEnd.HANDED_OVER, ProducerEnd.PREFIX_SENT}
        dropped = [] if is_wanted else self._drop_queued()
        return [*dropped, *self._wind_up()]

    def on_chunk_announced(self) -> None:
        """The next queued chunk's turn has come."""
        self.num_announced_chunks += 1

    def on_chunk_sent(self) -> list[Instruction]:
        """An announced chunk has left."""
        if self.state is ProducerState.OVER:
            return []
        self._num_sent_chunks += 1
        return self._wind_up() if self._end is not None else []

    def on_cancel(self, reason: str) -> list[Instruction]:
        """The consumer lets go: announce nothing more, say so, tell the scheduler unless its request has ended."""
        if self.state is not ProducerState.SENDING:
            return []
        dropped = self._drop_queued()
        if self._end is None:
            self.state = ProducerState.GIVEN_UP
            return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), ReportFailedSending(reason)]
        if not dropped:
            return []
        # FINISHED has promised what will not come: take that back.
        self._is_silent = False
        return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), *self._wind_up()]

    def on_link_lost(self, reason: str) -> list[Instruction]:
        """The link is dead: nothing reads its blocks any more."""
        if self.state is ProducerState.OVER:
            return []
        self._is_silent = self._is_answered = True
        self._num_queued_chunks = self.num_announced_chunks = self._num_sent_chunks
        if self._end is not None:
            return self._wind_up()
        return self._give_up(reason)

    def on_time(self, now_s: float) -> list[Instruction]:
        """READY has its deadline."""
        if self.state is not ProducerState.AWAITING_READY or now_s < self.deadline_s:
            return []
        return self._give_up("the consumer did not reserve blocks in time")

    def _give_up(self, reason: str) -> list[Instruction]:
        if self.state is ProducerState.GIVEN_UP:
            return []
        self.state = ProducerState.GIVEN_UP
        return [ReportFailedSending(reason)]

    def _drop_queued(self) -> list[Instruction]:
        if self._num_queued_chunks == self.num_announced_chunks:
            return []
        self._num_queued_chunks = self.num_announced_chunks
        return [DropQueued()]

    def _wind_up(self) -> list[Instruction]:
        """The request has ended: say so once, and let its blocks go when they have left."""
        assert self._end is not None, "only what has ended winds up"
        instructions = self._say_finished(self._end, "")
        if self._num_sent_chunks == self._num_queued_chunks:
            self.state = ProducerState.OVER
            instructions.append(ReportFinishedSending())
        return instructions

    def _say_finished(self, end: ProducerEnd, reason: str) -> list[Instruction]:
        if self._is_silent:
            return []
        self._is_silent = self._is_answered = True
        first_token_id = self._first_token_id if end is ProducerEnd.HANDED_OVER else None
        message = Finished(self.transfer_id, self.attempt, end, self._num_queued_chunks, first_token_id, reason)
        return [Send(message)]
