"""The producer's end of one transfer. See instructions.py for the protocol, and TRANSITIONS for every rule.

The request's own end in the scheduler (on_finish) can come in any state. OVER is reached once it has come and every
queued chunk has left, or the link is dead.

What is computed is queued in chunks; the link announces them when it is their turn (on_chunk_announced). FINISHED says
how many were queued, and need not wait for the last one's turn. A side that lets go has the rest dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

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
from kv_transfer.handoff.transfer_story import TransferStory
from kv_transfer.handoff.transition_table import Transition


class ProducerState(enum.IntEnum):
    """The states of a producer's transfer."""

    AWAITING_READY = enum.auto()
    SENDING = enum.auto()
    UNANSWERED = enum.auto()
    """READY did not come in time and the scheduler was told. A READY that comes later is owed an answer."""
    GIVEN_UP = enum.auto()
    """The consumer is gone or has let go: nothing more is announced; the scheduler was told."""
    FINISHING = enum.auto()
    """The request has ended in the scheduler; chunks are still to leave."""
    OVER = enum.auto()


class ProducerEvent(enum.IntEnum):
    """The events of a producer's transfer."""

    READY = enum.auto()
    COMPUTED = enum.auto()
    REQUEST_ENDED = enum.auto()
    CHUNK_SENT = enum.auto()
    CANCEL = enum.auto()
    LINK_LOST = enum.auto()
    DEADLINE = enum.auto()


class ProducerAction(enum.Enum):
    """The actions of a producer's transfer."""

    BEGIN = enum.auto()
    ANSWER_LATE = enum.auto()
    QUEUE = enum.auto()
    END = enum.auto()
    END_SILENTLY = enum.auto()
    COUNT = enum.auto()
    LET_GO = enum.auto()
    TAKE_BACK = enum.auto()
    GIVE_UP = enum.auto()
    FORGET_CHUNKS = enum.auto()


_S, _E, _A = ProducerState, ProducerEvent, ProducerAction
_Row: TypeAlias = Transition[ProducerState, ProducerAction]

TRANSITIONS: Mapping[tuple[ProducerState, ProducerEvent], _Row] = MappingProxyType(
    {
        (_S.AWAITING_READY, _E.READY): _Row(_A.BEGIN, (_S.SENDING,), "the scheduler may admit the request"),
        (_S.AWAITING_READY, _E.REQUEST_ENDED): _Row(_A.END_SILENTLY, (_S.OVER,), "nothing was begun"),
        (_S.AWAITING_READY, _E.LINK_LOST): _Row(_A.GIVE_UP, (_S.GIVEN_UP,), "the scheduler is told"),
        (_S.AWAITING_READY, _E.DEADLINE): _Row(_A.GIVE_UP, (_S.UNANSWERED,), "the scheduler is told"),
        (_S.SENDING, _E.COMPUTED): _Row(_A.QUEUE, (_S.SENDING,), "whole blocks are queued in chunks"),
        (_S.SENDING, _E.REQUEST_ENDED): _Row(
            _A.END, (_S.FINISHING, _S.OVER), "FINISHED; unless the consumer goes on, what is queued is dropped before"
        ),
        (_S.SENDING, _E.CHUNK_SENT): _Row(_A.COUNT, (_S.SENDING,), "counted"),
        (_S.SENDING, _E.CANCEL): _Row(
            _A.LET_GO, (_S.GIVEN_UP,), "what is queued is dropped; FINISHED; the scheduler is told"
        ),
        (_S.SENDING, _E.LINK_LOST): _Row(_A.GIVE_UP, (_S.GIVEN_UP,), "the scheduler is told"),
        (_S.UNANSWERED, _E.READY): _Row(_A.ANSWER_LATE, (_S.GIVEN_UP,), "FINISHED: READY came too late"),
        (_S.UNANSWERED, _E.REQUEST_ENDED): _Row(_A.END_SILENTLY, (_S.OVER,), "nothing was begun"),
        (_S.UNANSWERED, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.GIVEN_UP,), "no READY will come"),
        (_S.GIVEN_UP, _E.REQUEST_ENDED): _Row(
            _A.END_SILENTLY, (_S.FINISHING, _S.OVER), "what was announced is waited for"
        ),
        (_S.GIVEN_UP, _E.CHUNK_SENT): _Row(_A.COUNT, (_S.GIVEN_UP,), "counted"),
        (_S.GIVEN_UP, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.GIVEN_UP,), "nothing more leaves"),
        (_S.FINISHING, _E.CHUNK_SENT): _Row(
            _A.COUNT, (_S.FINISHING, _S.OVER), "counted; with the last one the blocks are let go"
        ),
        (_S.FINISHING, _E.CANCEL): _Row(
            _A.TAKE_BACK, (_S.FINISHING, _S.OVER), "what is queued is dropped, and a second FINISHED takes it back"
        ),
        (_S.FINISHING, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.OVER,), "the blocks are let go"),
    }
)
"""Every rule of a producer's end."""


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
    story: TransferStory = field(default_factory=TransferStory)
    _num_queued_chunks: int = 0
    _num_sent_chunks: int = 0
    _next_block: int = 0

    @property
    def is_awaiting_ready(self) -> bool:
        """Whether deadline_s counts."""
        return self.state is ProducerState.AWAITING_READY

    def on_ready(self, message: Ready) -> list[Instruction]:
        """The consumer has reserved its blocks. A second READY changes nothing. Raises ProtocolViolation."""
        row = self._find(ProducerEvent.READY)
        if row is None:
            return []
        if row.action is ProducerAction.ANSWER_LATE:
            # The consumer must not wait for what will never come.
            self._enter(row, ProducerState.GIVEN_UP)
            return self._say_finished(ProducerEnd.ABORTED, "READY came too late")
        if message.num_prompt_tokens != self.num_prompt_tokens and message.fetch is None:
            raise ProtocolViolation(
                f"{self.transfer_id}: the consumer expects {message.num_prompt_tokens} prompt tokens, "
                f"the producer has {self.num_prompt_tokens}"
            )
        if message.content_hash and self.content_hash and message.content_hash != self.content_hash:
            raise ProtocolViolation(f"{self.transfer_id}: the two ends' tokens, adapters or images are not the same")
        self._enter(row, ProducerState.SENDING)
        self._next_block = message.first_block
        return [ReportReady()]

    def on_computed(self, block_ids: tuple[int, ...], num_computed_tokens: int) -> list[Instruction]:
        """KV is there for so many tokens: whole blocks may leave, and the last one once the prompt is through."""
        if self._find(ProducerEvent.COMPUTED) is None:
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
        row = self._find(ProducerEvent.REQUEST_ENDED)
        if row is None:
            return []
        if row.action is ProducerAction.END_SILENTLY:
            return self._finish(row)
        # Only a consumer that goes on wants the rest.
        is_wanted = end in {ProducerEnd.HANDED_OVER, ProducerEnd.PREFIX_SENT}
        dropped = [] if is_wanted else self._drop_queued()
        return [*dropped, *self._say_finished(end, first_token_id=first_token_id), *self._finish(row)]

    def on_chunk_announced(self) -> None:
        """The next queued chunk's turn has come."""
        self.num_announced_chunks += 1

    def on_chunk_sent(self) -> list[Instruction]:
        """An announced chunk has left."""
        row = self._find(ProducerEvent.CHUNK_SENT)
        if row is None:
            return []
        self._num_sent_chunks += 1
        return self._finish(row) if self.state is ProducerState.FINISHING else []

    def on_cancel(self, reason: str) -> list[Instruction]:
        """The consumer lets go: announce nothing more, say so, tell the scheduler unless its request has ended."""
        row = self._find(ProducerEvent.CANCEL)
        if row is None:
            return []
        dropped = self._drop_queued()
        if row.action is ProducerAction.LET_GO:
            self._enter(row, ProducerState.GIVEN_UP)
            return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), ReportFailedSending(reason)]
        if not dropped:
            return []
        # FINISHED has promised what will not come: take that back.
        return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), *self._finish(row)]

    def on_link_lost(self, reason: str) -> list[Instruction]:
        """The link is dead: nothing reads its blocks any more."""
        row = self._find(ProducerEvent.LINK_LOST)
        if row is None:
            return []
        self._num_queued_chunks = self.num_announced_chunks = self._num_sent_chunks
        if self.state is ProducerState.FINISHING:
            return self._finish(row)
        self._enter(row, ProducerState.GIVEN_UP)
        return [ReportFailedSending(reason)] if row.action is ProducerAction.GIVE_UP else []

    def on_time(self, now_s: float) -> list[Instruction]:
        """READY has its deadline."""
        # Asked of every transfer after every event of the agent: at its deadline only it is an event.
        if self.state is not ProducerState.AWAITING_READY or now_s < self.deadline_s:
            return []
        row = self._find(ProducerEvent.DEADLINE)
        assert row is not None, "who awaits READY has a deadline"
        self._enter(row, ProducerState.UNANSWERED)
        return [ReportFailedSending("the consumer did not reserve blocks in time")]

    def tell(self) -> str:
        """The transfer's story, for a log."""
        return f"{self.transfer_id}, attempt {self.attempt}, producer: {self.story.tell(self.state)}"

    def _find(self, event: ProducerEvent) -> _Row | None:
        self.story.add(event, self.state)
        return TRANSITIONS.get((self.state, event))

    def _enter(self, row: _Row, state: ProducerState) -> None:
        assert state in row.next_states, f"{state.name} does not follow {self.state.name} by {row.action.name}"
        self.state = state

    def _drop_queued(self) -> list[Instruction]:
        if self._num_queued_chunks == self.num_announced_chunks:
            return []
        self._num_queued_chunks = self.num_announced_chunks
        return [DropQueued()]

    def _finish(self, row: _Row) -> list[Instruction]:
        """The request has ended: let its blocks go once all that was queued has left."""
        if self._num_sent_chunks < self._num_queued_chunks:
            self._enter(row, ProducerState.FINISHING)
            return []
        self._enter(row, ProducerState.OVER)
        return [ReportFinishedSending()]

    def _say_finished(self, end: ProducerEnd, reason: str = "", first_token_id: int | None = None) -> list[Instruction]:
        first_token_id = first_token_id if end is ProducerEnd.HANDED_OVER else None
        message = Finished(self.transfer_id, self.attempt, end, self._num_queued_chunks, first_token_id, reason)
        return [Send(message)]
