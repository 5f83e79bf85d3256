"""The producer's end of one transfer, as a pure machine. instructions.py has the protocol, TRANSITIONS every rule.

States. The transfer waits for READY, then sends. If the consumer does not go on with it, it is given up: the scheduler
is told, and ends the request. The request's end in the scheduler (on_finish) can come in any state. The transfer is
OVER once the request has ended, and every queued chunk has left or the link is dead.

Chunks. Computed blocks are queued in chunks; the link announces each chunk when its turn comes (on_chunk_announced).
FINISHED tells how many chunks were queued, and need not wait for the last one's turn. When the consumer cancels, or
the request ends without it, the chunks that are not announced are dropped.

Invariant: num_sent <= num_announced <= num_queued. What was announced is sent, unless the link dies.

The agent's thread owns the machine and carries its instructions out (agent/producer_transfers.py). Times are monotonic
seconds, which the caller passes in.
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
from kv_transfer.params import TransferId
from kv_transfer.transfer_stats import TransferFailure


class ProducerState(enum.IntEnum):
    """The states of a producer's transfer."""

    AWAITING_READY = enum.auto()
    """The consumer has not reserved its blocks yet; the request must not compute."""
    SENDING = enum.auto()
    """READY has arrived: blocks are queued as they are computed."""
    UNANSWERED = enum.auto()
    """READY did not come in time, and the scheduler was told. A READY that comes later has to be answered."""
    GIVEN_UP = enum.auto()
    """The consumer is gone or has cancelled, and the scheduler was told: nothing more is announced."""
    FINISHING = enum.auto()
    """The request has ended in the scheduler; chunks are still to leave."""
    OVER = enum.auto()
    """Nothing reads the request's blocks any more, and the scheduler was told."""


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
        (_S.AWAITING_READY, _E.REQUEST_ENDED): _Row(_A.END_SILENTLY, (_S.OVER,), "nothing was sent"),
        (_S.AWAITING_READY, _E.LINK_LOST): _Row(_A.GIVE_UP, (_S.GIVEN_UP,), "the scheduler is told"),
        (_S.AWAITING_READY, _E.DEADLINE): _Row(_A.GIVE_UP, (_S.UNANSWERED,), "the scheduler is told"),
        (_S.SENDING, _E.COMPUTED): _Row(_A.QUEUE, (_S.SENDING,), "complete blocks are queued in chunks"),
        (_S.SENDING, _E.REQUEST_ENDED): _Row(
            _A.END,
            (_S.FINISHING, _S.OVER),
            "FINISHED is sent; queued chunks are dropped first, unless the consumer goes on",
        ),
        (_S.SENDING, _E.CHUNK_SENT): _Row(_A.COUNT, (_S.SENDING,), "counted"),
        (_S.SENDING, _E.CANCEL): _Row(
            _A.LET_GO, (_S.GIVEN_UP,), "queued chunks are dropped, FINISHED is sent, the scheduler is told"
        ),
        (_S.SENDING, _E.LINK_LOST): _Row(_A.GIVE_UP, (_S.GIVEN_UP,), "the scheduler is told"),
        (_S.UNANSWERED, _E.READY): _Row(_A.ANSWER_LATE, (_S.GIVEN_UP,), "FINISHED is sent: READY came too late"),
        (_S.UNANSWERED, _E.REQUEST_ENDED): _Row(_A.END_SILENTLY, (_S.OVER,), "nothing was sent"),
        (_S.UNANSWERED, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.GIVEN_UP,), "no READY will come"),
        (_S.GIVEN_UP, _E.REQUEST_ENDED): _Row(_A.END_SILENTLY, (_S.FINISHING, _S.OVER), "announced chunks still leave"),
        (_S.GIVEN_UP, _E.CHUNK_SENT): _Row(_A.COUNT, (_S.GIVEN_UP,), "counted"),
        (_S.GIVEN_UP, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.GIVEN_UP,), "nothing more leaves"),
        (_S.FINISHING, _E.CHUNK_SENT): _Row(
            _A.COUNT, (_S.FINISHING, _S.OVER), "counted; with the last one the blocks are reported as unused"
        ),
        (_S.FINISHING, _E.CANCEL): _Row(
            _A.TAKE_BACK, (_S.FINISHING, _S.OVER), "queued chunks are dropped, and a second FINISHED takes them back"
        ),
        (_S.FINISHING, _E.LINK_LOST): _Row(_A.FORGET_CHUNKS, (_S.OVER,), "the blocks are reported as unused"),
    }
)
"""Every rule of a producer's end. An event that has no row in a state changes nothing."""


@dataclass(slots=True)
class ProducerMachine:
    """The producer's end of one transfer: takes events, returns instructions.

    block_size:       tokens of a block, or of a piece where the two ends have different block sizes (layout.py); set
                      again before on_ready, when the consumer is known
    max_chunk_blocks: the most blocks, or pieces, of one chunk; set again like block_size
    deadline_s:       monotonic; READY has to come before it
    content_hash:     of the producer's request; empty: not compared with the consumer's
    num_state_blocks: blocks of recurrent state that follow the prompt's blocks once all of the prompt is computed
    """

    transfer_id: TransferId
    attempt: int
    num_prompt_tokens: int
    block_size: int
    max_chunk_blocks: int
    deadline_s: float
    content_hash: bytes = b""
    num_state_blocks: int = 0
    state: ProducerState = ProducerState.AWAITING_READY
    num_announced_chunks: int = 0
    story: TransferStory = field(default_factory=TransferStory)
    _num_queued_chunks: int = 0
    _num_sent_chunks: int = 0
    _next_block: int = 0
    _has_lost_link: bool = False

    @property
    def failure(self) -> TransferFailure:
        """Why the transfer has failed, once ReportFailedSending has said that it has."""
        if self.state is ProducerState.UNANSWERED:
            return TransferFailure.NO_RESERVATION
        return TransferFailure.LINK_LOST if self._has_lost_link else TransferFailure.CONSUMER_CANCELLED

    @property
    def is_awaiting_ready(self) -> bool:
        """Whether READY has not come yet, so that deadline_s is still to be applied."""
        return self.state is ProducerState.AWAITING_READY

    def on_ready(self, message: Ready) -> list[Instruction]:
        """Begin to send: the consumer has reserved its blocks. A second READY changes nothing.

        message.first_block: in blocks, or pieces, of block_size tokens
        Raises ProtocolViolation, with the state unchanged, if the two ends mean different requests.
        """
        row = self._find(ProducerEvent.READY)
        if row is None:
            return []
        if row.action is ProducerAction.ANSWER_LATE:
            # FINISHED keeps the consumer from waiting for KV that will never come.
            self._enter(row, ProducerState.GIVEN_UP)
            return self._say_finished(ProducerEnd.ABORTED, "READY came too late")
        if message.num_prompt_tokens != self.num_prompt_tokens and message.fetch is None:
            raise ProtocolViolation(
                f"{self.transfer_id}: the consumer expects {message.num_prompt_tokens} prompt tokens, "
                f"the producer has {self.num_prompt_tokens}"
            )
        if message.content_hash and self.content_hash and message.content_hash != self.content_hash:
            raise ProtocolViolation(
                f"{self.transfer_id}: producer and consumer have different tokens, adapters or images"
            )
        self._enter(row, ProducerState.SENDING)
        self._next_block = message.first_block
        return [ReportReady()]

    def on_computed(self, block_ids: tuple[int, ...], num_computed_tokens: int) -> list[Instruction]:
        """Queue the blocks that are complete now that so many tokens are computed.

        block_ids: every block of the request, in order. The prompt's last block may be sent partly filled, once the
        whole prompt is computed; so are the blocks of the recurrent state, which changes until then.
        """
        if self._find(ProducerEvent.COMPUTED) is None:
            return []
        num_tokens = min(num_computed_tokens, self.num_prompt_tokens)
        is_through = num_tokens == self.num_prompt_tokens
        num_blocks = num_tokens // self.block_size
        if is_through:
            num_blocks = -(-num_tokens // self.block_size) + self.num_state_blocks
        if num_blocks <= self._next_block:
            return []
        starts = range(self._next_block, num_blocks, self.max_chunk_blocks)
        self._next_block = num_blocks
        self._num_queued_chunks += len(starts)
        return [SendBlocks(first, block_ids[first : min(first + starts.step, num_blocks)]) for first in starts]

    def on_finish(self, end: ProducerEnd, first_token_id: int | None) -> list[Instruction]:
        """Note that the request has ended in the scheduler, and send FINISHED if the consumer is still there.

        first_token_id: token 0, if end is HANDED_OVER. Queued chunks are dropped unless the consumer goes on.
        """
        row = self._find(ProducerEvent.REQUEST_ENDED)
        if row is None:
            return []
        if row.action is ProducerAction.END_SILENTLY:
            return self._finish(row)
        # The queued chunks are sent only if the consumer continues with the request.
        is_wanted = end in {ProducerEnd.HANDED_OVER, ProducerEnd.PREFIX_SENT}
        dropped = [] if is_wanted else self._drop_queued()
        return [*dropped, *self._say_finished(end, first_token_id=first_token_id), *self._finish(row)]

    def on_chunk_announced(self) -> None:
        """Count a chunk whose turn has come."""
        self.num_announced_chunks += 1

    def on_chunk_sent(self) -> list[Instruction]:
        """Count an announced chunk that has left."""
        row = self._find(ProducerEvent.CHUNK_SENT)
        if row is None:
            return []
        self._num_sent_chunks += 1
        return self._finish(row) if self.state is ProducerState.FINISHING else []

    def on_cancel(self, reason: str) -> list[Instruction]:
        """Drop what is not announced: the consumer has cancelled.

        FINISHED answers the consumer, unless an earlier FINISHED holds already. The scheduler is told, unless the
        request has ended there.
        """
        row = self._find(ProducerEvent.CANCEL)
        if row is None:
            return []
        dropped = self._drop_queued()
        if row.action is ProducerAction.LET_GO:
            self._enter(row, ProducerState.GIVEN_UP)
            return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), ReportFailedSending(reason)]
        if not dropped:
            return []
        # The earlier FINISHED announced chunks that will not be sent: a second FINISHED replaces it.
        return [*dropped, *self._say_finished(ProducerEnd.ABORTED, reason), *self._finish(row)]

    def on_link_lost(self, reason: str) -> list[Instruction]:
        """Give the transfer up: the link is dead, and its transport reads no block any more."""
        row = self._find(ProducerEvent.LINK_LOST)
        if row is None:
            return []
        self._has_lost_link = True
        self._num_queued_chunks = self.num_announced_chunks = self._num_sent_chunks
        if self.state is ProducerState.FINISHING:
            return self._finish(row)
        self._enter(row, ProducerState.GIVEN_UP)
        return [ReportFailedSending(reason)] if row.action is ProducerAction.GIVE_UP else []

    def on_time(self, now_s: float) -> list[Instruction]:
        """Give the request up if READY has not come by the deadline. now_s: monotonic."""
        # The agent calls this for every transfer after each of its events: it is an event only at the deadline.
        if self.state is not ProducerState.AWAITING_READY or now_s < self.deadline_s:
            return []
        row = self._find(ProducerEvent.DEADLINE)
        assert row is not None, "a transfer that awaits READY has a deadline"
        self._enter(row, ProducerState.UNANSWERED)
        return [ReportFailedSending("the consumer did not reserve blocks in time")]

    def tell(self) -> str:
        """Return the transfer's story in one line, for a log."""
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
        """Note that the request has ended, and report its blocks as unused once every queued chunk has left."""
        if self._num_sent_chunks < self._num_queued_chunks:
            self._enter(row, ProducerState.FINISHING)
            return []
        self._enter(row, ProducerState.OVER)
        return [ReportFinishedSending()]

    def _say_finished(self, end: ProducerEnd, reason: str = "", first_token_id: int | None = None) -> list[Instruction]:
        first_token_id = first_token_id if end is ProducerEnd.HANDED_OVER else None
        message = Finished(self.transfer_id, self.attempt, end, self._num_queued_chunks, first_token_id, reason)
        return [Send(message)]
