"""Both machines of one transfer over a simulated link: whatever happens in whatever order, blocks are safe.

The link is ordered and may die; a chunk waits for its turn for as long as others need, and its bytes leave the producer
(its block may then be reused) some time before they arrive. What a machine says is carried out as the table of
transfers does it.

Tests of kv_transfer/handoff/control_messages.py.
"""

from __future__ import annotations

import math
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
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

BLOCK_SIZE = 4
TOKEN_ID = 42
DEADLINE_S = 100.0
GARBAGE = -1


class HandoffMachine(RuleBasedStateMachine):
    """A block's content is its position in the prompt; what the producer's cache holds afterwards is garbage."""

    @initialize(
        num_prompt_tokens=st.integers(1, 30),
        local=st.integers(0, 8),
        max_chunk_blocks=st.integers(1, 4),
        dies_at_the_end=st.booleans(),
        data=st.data(),
    )
    def begin(
        self, num_prompt_tokens: int, local: int, max_chunk_blocks: int, dies_at_the_end: bool, data: st.DataObject
    ) -> None:
        num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
        self.num_prompt_tokens, self.dies_at_the_end = num_prompt_tokens, dies_at_the_end
        self.num_local_blocks = min(local, num_blocks)
        self.source_ids = tuple(data.draw(st.permutations(range(num_blocks))))
        self.target_ids = tuple(100 + i for i in data.draw(st.permutations(range(num_blocks))))
        self.source = dict.fromkeys(self.source_ids, GARBAGE)
        self.target = {self.target_ids[i]: i for i in range(self.num_local_blocks)}

        self.upward: deque[Ready | Cancel] = deque()
        self.downward: deque[Chunk | Finished] = deque()
        self.queued: deque[SendBlocks] = deque()
        self.leaving: deque[tuple[int, ...]] = deque()
        self.flying: deque[tuple[int, ...]] = deque()
        self.receives: deque[tuple[int, ...]] = deque()
        self.is_lost = False
        self.is_corrupted = False
        self.is_linked = False
        """The producer knows its consumer's link: READY has come."""
        self.num_computed_tokens = 0
        self.end: ProducerEnd | None = None
        self.said_finished: list[Finished] = []
        self.is_cancelled = False
        self.ready_reports: list[ReportReady] = []
        self.failures: list[str] = []
        self.num_finished_sending = 0
        self.reports: list[ReceivedKV] = []

        self.producer = ProducerMachine("t", 0, num_prompt_tokens, BLOCK_SIZE, max_chunk_blocks, DEADLINE_S)
        self.consumer = ConsumerMachine(
            "t", 0, self.target_ids, self.num_local_blocks, num_prompt_tokens, BLOCK_SIZE, 1, drain_timeout_s=1.0
        )
        self.follow_consumer(self.consumer.start())

    # -- what schedulers do ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.ready_reports and self.end is None and not self.is_computed)
    @rule(num_tokens=st.integers(1, 30))
    def compute(self, num_tokens: int) -> None:
        """The scheduler admits a producer's request only once READY is in."""
        self.num_computed_tokens = min(self.num_computed_tokens + num_tokens, self.num_prompt_tokens)
        # A block that is not full yet, although the prompt goes on, is not right yet.
        num_blocks = len(self.source_ids) if self.is_computed else self.num_computed_tokens // BLOCK_SIZE
        for position in range(num_blocks):
            self.source[self.source_ids[position]] = position
        self.follow_producer(self.producer.on_computed(self.source_ids, self.num_computed_tokens))

    @precondition(lambda self: self.end is None and self.is_computed)
    @rule(end=st.sampled_from([ProducerEnd.HANDED_OVER, ProducerEnd.FINISHED_HERE]))
    def finish(self, end: ProducerEnd) -> None:
        self.finish_as(end)

    @precondition(lambda self: self.end is None)
    @rule(is_meant=st.integers(0, 3))
    def abort(self, is_meant: int) -> None:
        if is_meant == 0 or self.failures:
            self.finish_as(ProducerEnd.ABORTED)

    @precondition(lambda self: not self.is_cancelled)
    @rule(is_meant=st.integers(0, 3))
    def cancel(self, is_meant: int) -> None:
        if is_meant == 0 and not self.reports:
            self.is_cancelled = True
            self.follow_consumer(self.consumer.on_cancel(0.0))

    # -- what the link does ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.upward)
    @rule(is_repeated=st.booleans())
    def deliver_upward(self, is_repeated: bool) -> None:
        message = self.upward.popleft()
        if is_repeated:
            self.upward.append(message)
        if self.producer.state is ProducerState.OVER:
            if isinstance(message, Ready):
                # The table has forgotten the transfer, and refuses.
                self.downward.append(Finished("t", 0, ProducerEnd.ABORTED, 0, None, "gone"))
        elif isinstance(message, Ready):
            self.is_linked = True
            self.follow_producer(self.producer.on_ready(message))
        else:
            self.follow_producer(self.producer.on_cancel("let go"))

    @precondition(lambda self: self.downward)
    @rule()
    def deliver_downward(self) -> None:
        message = self.downward.popleft()
        if self.reports:
            assert isinstance(message, Finished), "chunks of a transfer that is over would have nowhere to go"
        elif isinstance(message, Chunk):
            self.follow_consumer(self.consumer.on_chunk(message, 0.0))
        else:
            self.follow_consumer(self.consumer.on_finished(message, 0.0))

    @precondition(lambda self: self.queued and not self.is_lost)
    @rule()
    def chunk_has_its_turn(self) -> None:
        chunk = self.queued.popleft()
        assert not any(self.source[block_id] == GARBAGE for block_id in chunk.block_ids)
        self.producer.on_chunk_announced()
        self.put_downward(Chunk("t", 0, chunk.first_block, len(chunk.block_ids)))
        self.leaving.append(chunk.block_ids)

    @precondition(lambda self: self.leaving)
    @rule()
    def chunk_leaves(self) -> None:
        self.flying.append(tuple(self.source[block_id] for block_id in self.leaving.popleft()))
        self.follow_producer(self.producer.on_chunk_sent())

    @precondition(lambda self: self.flying and self.receives)
    @rule(corrupts=st.sampled_from([False, False, False, True]))
    def chunk_arrives(self, corrupts: bool) -> None:
        contents, block_ids = self.flying.popleft(), self.receives.popleft()
        if corrupts:
            self.is_corrupted = True
            contents = (GARBAGE,) * len(contents)
        assert not self.reports, "a reported transfer's blocks were written"
        self.target.update(zip(block_ids, contents, strict=True))
        self.follow_consumer(self.consumer.on_chunk_received(len(block_ids), 0.0, is_intact=not corrupts))

    @precondition(lambda self: not self.is_lost)
    @rule(is_meant=st.integers(0, 5))
    def lose_link(self, is_meant: int) -> None:
        if is_meant == 0 or self.consumer.is_overdue(math.inf):
            self.cut()

    @precondition(lambda self: self.is_lost)
    @rule()
    def producer_hears_of_the_loss(self) -> None:
        if self.is_linked and not self.num_finished_sending:
            self.follow_producer(self.producer.on_link_lost("cut"))

    @precondition(lambda self: self.is_lost and not self.reports)
    @rule()
    def consumer_hears_of_the_loss(self) -> None:
        self.follow_consumer(self.consumer.on_link_lost("cut"))

    @rule(is_meant=st.integers(0, 5), now_s=st.sampled_from([DEADLINE_S - 1, DEADLINE_S, DEADLINE_S + 1]))
    def time_passes(self, is_meant: int, now_s: float) -> None:
        if is_meant == 0:
            self.follow_producer(self.producer.on_time(now_s))

    # -- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        if self.dies_at_the_end and not self.is_lost:
            self.cut()
        self.settle()
        if self.end is None:
            if self.ready_reports and not self.failures:
                self.compute(self.num_prompt_tokens)
                self.finish_as(ProducerEnd.HANDED_OVER)
            else:
                self.finish_as(ProducerEnd.ABORTED)
        self.settle()
        assert self.producer.state is ProducerState.OVER
        assert self.num_finished_sending == 1
        assert self.consumer.is_over
        assert len(self.reports) == 1
        assert self.consumer.deadline_s is None
        on_their_way = [*self.queued, *self.leaving, *self.flying, *self.receives]
        assert on_their_way == [], "what was announced was received"

    def settle(self) -> None:
        """Everything arrives, or both ends learn that nothing will."""
        if self.is_lost:
            self.producer_hears_of_the_loss()
            if not self.reports:
                self.consumer_hears_of_the_loss()
        while self.upward or self.downward or self.queued or self.leaving or (self.flying and self.receives):
            if self.upward:
                self.deliver_upward(is_repeated=False)
            if self.downward:
                self.deliver_downward()
            if self.queued:
                self.chunk_has_its_turn()
            if self.leaving:
                self.chunk_leaves()
            if self.flying and self.receives:
                self.chunk_arrives(corrupts=False)

    # -- what machines say ----------------------------------------------------------------------------------------

    @property
    def is_computed(self) -> bool:
        return self.num_computed_tokens == self.num_prompt_tokens

    def cut(self) -> None:
        self.is_lost = True
        for pending in (self.upward, self.downward, self.queued, self.leaving, self.flying, self.receives):
            pending.clear()

    def finish_as(self, end: ProducerEnd) -> None:
        self.end = end
        self.follow_producer(self.producer.on_finish(end, TOKEN_ID if end is ProducerEnd.HANDED_OVER else None))

    def follow_producer(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert not self.num_finished_sending, f"{instruction} after the last one"
            match instruction:
                case Send(Finished() as message):
                    self.check_finished(message)
                    self.said_finished.append(message)
                    self.put_downward(message)
                case SendBlocks(first_block, block_ids):
                    assert not self.said_finished, "FINISHED counts what was queued"
                    assert not self.failures, "a given up transfer queues nothing"
                    assert block_ids == self.source_ids[first_block : first_block + len(block_ids)]
                    assert 1 <= len(block_ids) <= self.producer.max_chunk_blocks
                    if not self.is_lost:
                        self.queued.append(instruction)
                case DropQueued():
                    assert self.is_cancelled or self.end in {ProducerEnd.ABORTED, ProducerEnd.FINISHED_HERE}
                    self.queued.clear()
                case ReportReady():
                    self.ready_reports.append(instruction)
                    assert len(self.ready_reports) == 1
                case ReportFailedSending(reason):
                    self.failures.append(reason)
                    assert len(self.failures) == 1
                case ReportFinishedSending():
                    assert self.end is not None, "blocks of a request that has not ended"
                    assert not self.queued, "blocks that are still to be read"
                    assert not self.leaving, "blocks that are still being read"
                    self.num_finished_sending += 1
                    self.source = dict.fromkeys(self.source, GARBAGE)
                case _:
                    raise AssertionError(f"this is no instruction of a producer: {instruction}")

    def check_finished(self, message: Finished) -> None:
        """A second one only takes back what the first one promised to a consumer that has cancelled."""
        if self.said_finished:
            assert len(self.said_finished) == 1
            assert self.is_cancelled
            assert message.num_chunks < self.said_finished[0].num_chunks
        assert (message.first_token_id is not None) == (message.end is ProducerEnd.HANDED_OVER)

    def put_downward(self, message: Chunk | Finished) -> None:
        if not self.is_lost:
            self.downward.append(message)

    def follow_consumer(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert not self.reports, f"{instruction} after the last one"
            match instruction:
                case Send((Ready() | Cancel()) as message):
                    if not self.is_lost:
                        self.upward.append(message)
                case ReceiveBlocks(block_ids):
                    self.receives.append(block_ids)
                case ReportReceived(received):
                    assert not self.receives, "blocks that may still be written"
                    on_its_way = [message for message in self.downward if isinstance(message, Chunk)]
                    assert self.is_lost or not (on_its_way or self.queued or self.leaving or self.flying)
                    self.reports.append(received)
                    self.check_report(received)
                case _:
                    raise AssertionError(f"this is no instruction of a consumer: {instruction}")

    def check_report(self, received: ReceivedKV) -> None:
        valid = self.target_ids[: -(-received.num_valid_tokens // BLOCK_SIZE)]
        assert [self.target.get(block_id) for block_id in valid] == list(range(len(valid)))
        assert (received.first_token_id is not None) == (received.outcome is LoadOutcome.LOADED)
        match received.outcome:
            case LoadOutcome.LOADED:
                assert self.end is ProducerEnd.HANDED_OVER
                assert received.first_token_id == TOKEN_ID
                assert received.num_valid_tokens == self.num_prompt_tokens
                assert not self.is_cancelled
                assert not self.is_corrupted
            case LoadOutcome.RELEASED:
                assert self.end is ProducerEnd.FINISHED_HERE
                assert not self.is_cancelled
            case LoadOutcome.CANCELLED:
                assert self.is_cancelled
            case LoadOutcome.FAILED:
                assert received.reason
                assert not self.is_cancelled
                assert self.is_lost or self.is_corrupted or self.end is ProducerEnd.ABORTED or self.failures


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
