"""The consumer's end of one transfer, as a pure machine. instructions.py has the protocol, TRANSITIONS every rule.

The transfer is over with its one report: when FINISHED has arrived and as many chunks as it says have been received,
or when the link is dead. The producer owes chunks until FINISHED has arrived and that many have been announced; a
second FINISHED, with a smaller number, takes chunks back.

Invariants: num_received <= num_announced, and num_announced <= FINISHED's number once that is known. Chunks arrive in
order, so the blocks that were received intact are a prefix of the prompt. After the report nothing writes the blocks.

The agent's thread owns the machine and carries its instructions out (agent/consumer_transfers.py). Times are monotonic
seconds, which the caller passes in.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import Cancel, Chunk, Finished, Ready
from kv_transfer.handoff.instructions import Instruction, ReceiveBlocks, ReportReceived, Send
from kv_transfer.handoff.transfer_story import TransferStory
from kv_transfer.handoff.transition_table import Transition
from kv_transfer.params import TransferId
from kv_transfer.transfer_stats import TransferFailure, TransferTimings

if TYPE_CHECKING:
    # The simulator reads this file, and torch takes seconds to load.
    from kv_transfer.block_pieces import PieceMap


class ConsumerState(enum.IntEnum):
    """The states of a consumer's transfer."""

    OWED = enum.auto()
    """FINISHED has not arrived: the number of chunks is not known yet."""
    PROMISED = enum.auto()
    """FINISHED has arrived, and has promised chunks that are not announced yet."""
    ARRIVING = enum.auto()
    """Every chunk is announced; some are still to arrive."""
    CANCELLED = enum.auto()
    """CANCEL was sent, and the producer may still announce chunks: its answer has a deadline."""
    DRAINING = enum.auto()
    """The load was cancelled; every chunk is announced, and some are still to arrive."""
    OVER = enum.auto()
    """The one report was made."""


class ConsumerEvent(enum.IntEnum):
    """The events of a consumer's transfer."""

    CHUNK = enum.auto()
    CHUNK_RECEIVED = enum.auto()
    FINISHED = enum.auto()
    CANCEL = enum.auto()
    LINK_LOST = enum.auto()


class ConsumerAction(enum.Enum):
    """The actions of a consumer's transfer."""

    RECEIVE = enum.auto()
    COUNT = enum.auto()
    LEARN_END = enum.auto()
    SEND_CANCEL = enum.auto()
    DRAIN = enum.auto()
    FAIL = enum.auto()


_S, _E, _A = ConsumerState, ConsumerEvent, ConsumerAction
_Row: TypeAlias = Transition[ConsumerState, ConsumerAction]
_FAIL: Final = _Row(_A.FAIL, (_S.OVER,), "reported: FAILED")
_CANCELLED: Final = _Row(_A.FAIL, (_S.OVER,), "reported: CANCELLED")

TRANSITIONS: Mapping[tuple[ConsumerState, ConsumerEvent], _Row] = MappingProxyType(
    {
        (_S.OWED, _E.CHUNK): _Row(_A.RECEIVE, (_S.OWED,), "received"),
        (_S.OWED, _E.CHUNK_RECEIVED): _Row(_A.COUNT, (_S.OWED,), "counted"),
        (_S.OWED, _E.FINISHED): _Row(
            _A.LEARN_END, (_S.PROMISED, _S.ARRIVING, _S.OVER), "the end is known; reported if every chunk is here"
        ),
        (_S.OWED, _E.CANCEL): _Row(_A.SEND_CANCEL, (_S.CANCELLED,), "CANCEL is sent"),
        (_S.OWED, _E.LINK_LOST): _FAIL,
        (_S.PROMISED, _E.CHUNK): _Row(_A.RECEIVE, (_S.PROMISED, _S.ARRIVING), "received"),
        (_S.PROMISED, _E.CHUNK_RECEIVED): _Row(_A.COUNT, (_S.PROMISED,), "counted"),
        (_S.PROMISED, _E.FINISHED): _Row(
            _A.LEARN_END, (_S.PROMISED, _S.ARRIVING, _S.OVER), "chunks are taken back; reported if every chunk is here"
        ),
        (_S.PROMISED, _E.CANCEL): _Row(_A.SEND_CANCEL, (_S.CANCELLED,), "CANCEL is sent"),
        (_S.PROMISED, _E.LINK_LOST): _FAIL,
        (_S.ARRIVING, _E.CHUNK_RECEIVED): _Row(_A.COUNT, (_S.ARRIVING, _S.OVER), "reported with the last one"),
        (_S.ARRIVING, _E.CANCEL): _Row(_A.DRAIN, (_S.DRAINING,), "no CANCEL is sent: everything is announced"),
        (_S.ARRIVING, _E.LINK_LOST): _FAIL,
        (_S.CANCELLED, _E.CHUNK): _Row(_A.RECEIVE, (_S.CANCELLED, _S.DRAINING), "received"),
        (_S.CANCELLED, _E.CHUNK_RECEIVED): _Row(_A.COUNT, (_S.CANCELLED,), "counted"),
        (_S.CANCELLED, _E.FINISHED): _Row(
            _A.LEARN_END,
            (_S.CANCELLED, _S.DRAINING, _S.OVER),
            "CANCEL is answered, unless more chunks are promised; reported if every chunk is here",
        ),
        (_S.CANCELLED, _E.LINK_LOST): _CANCELLED,
        (_S.DRAINING, _E.CHUNK_RECEIVED): _Row(_A.COUNT, (_S.DRAINING, _S.OVER), "reported with the last one"),
        (_S.DRAINING, _E.LINK_LOST): _CANCELLED,
    }
)
"""Every rule of a consumer's end. A chunk where there is no rule for it breaks the protocol."""


@dataclass(slots=True)
class ConsumerMachine:
    """The consumer's end of one transfer: takes events, returns instructions.

    block_ids:        the prompt's blocks in order, those included that are already here; then num_state_blocks blocks
                      of recurrent state
    num_local_blocks: how many of them, from the first one on, are already here
    block_size:       tokens of a block; with block_size_bytes, block_ids and num_local_blocks counted in pieces after
                      use_pieces()
    drain_timeout_s:  how long the producer may take to answer a cancel
    fetch:            what READY asks for; None: this is a handoff
    content_hash:     of the consumer's request; empty: not compared with the producer's
    """

    transfer_id: TransferId
    attempt: int
    block_ids: tuple[int, ...]
    num_local_blocks: int
    num_prompt_tokens: int
    block_size: int
    block_size_bytes: int
    drain_timeout_s: float
    fetch: Fetch | None = None
    content_hash: bytes = b""
    num_state_blocks: int = 0
    state: ConsumerState = ConsumerState.OWED
    deadline_s: float | None = None
    """Monotonic, set while CANCELLED: if the producer still owes chunks by then, the link has to be closed."""
    num_announced_chunks: int = 0
    story: TransferStory = field(default_factory=TransferStory)
    _num_announced_blocks: int = 0
    _num_valid_blocks: int = 0
    _num_received_chunks: int = 0
    _corrupt_chunk: int | None = None
    """The index of the first corrupt chunk. Nothing from this chunk on is valid; all of it is still received."""
    _finished: Finished | None = None
    _first_chunk_s: float | None = None
    _prefill_finished_s: float | None = None
    _is_in_pieces: bool = False

    @property
    def failure(self) -> TransferFailure:
        """Why the load has failed, once ReportReceived has said that it has."""
        if self._finished is None or self._num_received_chunks < self._finished.num_chunks:
            return TransferFailure.LINK_LOST
        return TransferFailure.PRODUCER_GAVE_UP if self._corrupt_chunk is None else TransferFailure.CORRUPT

    @property
    def is_over(self) -> bool:
        """Whether the one report was made."""
        return self.state is ConsumerState.OVER

    def start(self) -> list[Instruction]:
        """Return the READY that tells the producer that the blocks are reserved."""
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
        """Count in pieces, as chunks do, from now on. Called before each chunk; only the first call has an effect."""
        if not self._is_in_pieces:
            self._is_in_pieces = True
            self.block_ids = pieces.ids(self.block_ids)
            self.num_local_blocks *= pieces.pieces_per_block
            self.block_size, self.block_size_bytes = pieces.piece_tokens, pieces.piece_size_bytes

    def on_chunk(self, message: Chunk, now_s: float) -> list[Instruction]:
        """Receive announced blocks.

        Raises ProtocolViolation if they are not the transfer's next blocks, or if no chunk is owed any more.
        """
        row = self._find(ConsumerEvent.CHUNK)
        first = self.num_local_blocks + self._num_announced_blocks
        stop = first + message.num_blocks
        is_next = message.first_block == first and message.num_blocks >= 1 and stop <= len(self.block_ids)
        if row is None or not is_next:
            raise ProtocolViolation(
                f"{self.transfer_id}: the producer announced {message.num_blocks} blocks from block "
                f"{message.first_block} on; the next block is {first} of {len(self.block_ids)}"
            )
        if self._first_chunk_s is None:
            self._first_chunk_s = now_s
        self._num_announced_blocks += message.num_blocks
        self.num_announced_chunks += 1
        self._enter(row, self._state_by_debt())
        return [ReceiveBlocks(self.block_ids[first:stop])]

    def on_chunk_received(self, num_blocks: int, now_s: float, *, is_intact: bool = True) -> list[Instruction]:
        """Count the oldest announced chunk, which has arrived. Raises ProtocolViolation, as on_finished() does.

        is_intact: whether both ends' checksums of the chunk agree
        """
        row = self._find(ConsumerEvent.CHUNK_RECEIVED)
        if row is None:
            return []
        if self._corrupt_chunk is None and not is_intact:
            self._corrupt_chunk = self._num_received_chunks
        if self._corrupt_chunk is None:
            self._num_valid_blocks += num_blocks
        self._num_received_chunks += 1
        return self._report_if_complete(row, now_s)

    def on_finished(self, message: Finished, now_s: float) -> list[Instruction]:
        """Learn the number of chunks and how the request ended; some chunks may be announced later.

        Raises ProtocolViolation if more chunks were announced than FINISHED says, or if a handoff has ended with KV
        for a part of the prompt only.
        """
        row = self._find(ConsumerEvent.FINISHED)
        if row is None:
            return []
        if message.num_chunks < self.num_announced_chunks:
            raise ProtocolViolation(
                f"{self.transfer_id}: FINISHED counts {message.num_chunks} chunks, but the producer has announced "
                f"{self.num_announced_chunks}"
            )
        if self._finished is None:
            self._prefill_finished_s = now_s
        self._finished = message
        self._enter(row, self._state_by_debt())
        return self._report_if_complete(row, now_s)

    def on_cancel(self, now_s: float) -> list[Instruction]:
        """Cancel the load: tell the producer if it still owes chunks, and go on receiving what was announced."""
        row = self._find(ConsumerEvent.CANCEL)
        if row is None:
            return []
        if row.action is ConsumerAction.DRAIN:
            self._enter(row, ConsumerState.DRAINING)
            return []
        self._enter(row, ConsumerState.CANCELLED)
        self.deadline_s = now_s + self.drain_timeout_s
        return [Send(Cancel(self.transfer_id, self.attempt))]

    def on_link_lost(self, reason: str) -> list[Instruction]:
        """Report the end: the link is dead, and its transport writes no block any more."""
        row = self._find(ConsumerEvent.LINK_LOST)
        if row is None:
            return []
        outcome = LoadOutcome.CANCELLED if self._is_cancelled else LoadOutcome.FAILED
        return self._report(row, ReceivedKV(outcome, self.num_valid_tokens, reason=reason))

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the producer has not answered a cancel in time."""
        return self.deadline_s is not None and self.deadline_s <= now_s

    def tell(self) -> str:
        """Return the transfer's story in one line, for a log."""
        return f"{self.transfer_id}, attempt {self.attempt}, consumer: {self.story.tell(self.state)}"

    @property
    def _is_cancelled(self) -> bool:
        return self.state in {ConsumerState.CANCELLED, ConsumerState.DRAINING}

    def _state_by_debt(self) -> ConsumerState:
        """Return the state that fits what the producer may still announce."""
        if self._finished is None:
            return self.state
        if self.num_announced_chunks < self._finished.num_chunks:
            return ConsumerState.CANCELLED if self._is_cancelled else ConsumerState.PROMISED
        return ConsumerState.DRAINING if self._is_cancelled else ConsumerState.ARRIVING

    def _find(self, event: ConsumerEvent) -> _Row | None:
        self.story.add(event, self.state)
        return TRANSITIONS.get((self.state, event))

    def _enter(self, row: _Row, state: ConsumerState) -> None:
        assert state in row.next_states, f"{state.name} does not follow {self.state.name} by {row.action.name}"
        self.state = state
        if state is not ConsumerState.CANCELLED:
            self.deadline_s = None

    @property
    def num_valid_tokens(self) -> int:
        """How many tokens from the prompt's start have their KV here, intact: chunks arrive in order."""
        num_blocks = self.num_local_blocks + self._num_valid_blocks
        return min(num_blocks * self.block_size, self.num_prompt_tokens)

    def _report_if_complete(self, row: _Row, now_s: float) -> list[Instruction]:
        finished = self._finished
        if finished is None or self._num_received_chunks < finished.num_chunks:
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
                f"{self.transfer_id}: the producer handed the request over after sending the KV of {num_valid_tokens} "
                f"of its {self.num_prompt_tokens} prompt tokens"
            )
        elif self.num_state_blocks and self.num_local_blocks + self._num_valid_blocks < len(self.block_ids):
            raise ProtocolViolation(
                f"{self.transfer_id}: the producer handed the request over without all of its recurrent state"
            )
        else:
            token_id = finished.first_token_id
            received = ReceivedKV(LoadOutcome.LOADED, num_valid_tokens, first_token_id=token_id, timings=timings)
        return self._report(row, received)

    def _report(self, row: _Row, received: ReceivedKV) -> list[Instruction]:
        self._enter(row, ConsumerState.OVER)
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
