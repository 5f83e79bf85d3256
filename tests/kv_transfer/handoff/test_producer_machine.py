"""Every event in every state of a producer's transfer, with all that it answers.

Tests of kv_transfer/handoff/instructions.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
from kv_transfer.handoff.producer_machine import ProducerMachine, ProducerState
from kv_transfer.transfer_stats import TransferFailure

DEADLINE_S = 100.0
BLOCKS = (9, 4, 7)
"""For 10 tokens in blocks of 4: the last one is partial."""

LATE = "READY came too late"
NO_READY = "the consumer did not reserve blocks in time"

Event = Callable[[ProducerMachine], list[Instruction]]


def new_transfer(max_chunk_blocks: int = 100) -> ProducerMachine:
    return ProducerMachine(
        transfer_id="t",
        attempt=3,
        num_prompt_tokens=10,
        block_size=4,
        max_chunk_blocks=max_chunk_blocks,
        deadline_s=DEADLINE_S,
    )


def ready(first_block: int = 0, num_prompt_tokens: int = 10) -> Event:
    return lambda transfer: transfer.on_ready(Ready("t", 3, first_block, num_prompt_tokens))


def computed(num_tokens: int) -> Event:
    return lambda transfer: transfer.on_computed(BLOCKS, num_tokens)


def finish(end: ProducerEnd) -> Event:
    first_token_id = 42 if end is ProducerEnd.HANDED_OVER else None
    return lambda transfer: transfer.on_finish(end, first_token_id)


def announced(transfer: ProducerMachine) -> list[Instruction]:
    transfer.on_chunk_announced()
    return []


def chunk_sent(transfer: ProducerMachine) -> list[Instruction]:
    return transfer.on_chunk_sent()


def cancel(transfer: ProducerMachine) -> list[Instruction]:
    return transfer.on_cancel("let go")


def link_lost(transfer: ProducerMachine) -> list[Instruction]:
    return transfer.on_link_lost("cut")


def time_is(now_s: float) -> Event:
    return lambda transfer: transfer.on_time(now_s)


def finished(end: ProducerEnd, num_chunks: int, first_token_id: int | None = None, reason: str = "") -> Send:
    return Send(Finished("t", 3, end, num_chunks, first_token_id, reason))


HANDED_OVER = finish(ProducerEnd.HANDED_OVER)
FINISHED_HERE = finish(ProducerEnd.FINISHED_HERE)
ABORTED = finish(ProducerEnd.ABORTED)

STATES: dict[str, tuple[list[Event], ProducerState]] = {
    "awaiting": ([], ProducerState.AWAITING_READY),
    "sending": ([ready()], ProducerState.SENDING),
    "sending, a chunk on its way": ([ready(), computed(5), announced], ProducerState.SENDING),
    "finishing, a chunk on its way": ([ready(), computed(10), announced, HANDED_OVER], ProducerState.FINISHING),
    "sending, a chunk queued": ([ready(), computed(5)], ProducerState.SENDING),
    "sending, one chunk announced, one queued": (
        [ready(), computed(5), announced, computed(10)],
        ProducerState.SENDING,
    ),
    "finishing, one chunk announced, one queued": (
        [ready(), computed(5), announced, computed(10), HANDED_OVER],
        ProducerState.FINISHING,
    ),
    "finishing, a chunk queued": ([ready(), computed(10), HANDED_OVER], ProducerState.FINISHING),
    "unanswered": ([time_is(DEADLINE_S)], ProducerState.UNANSWERED),
    "given up: cancelled": ([ready(), cancel], ProducerState.GIVEN_UP),
    "given up: cancelled, a chunk on its way": ([ready(), computed(5), announced, cancel], ProducerState.GIVEN_UP),
    "given up: link lost": ([ready(), computed(5), announced, link_lost], ProducerState.GIVEN_UP),
    "over": ([ready(), computed(10), announced, chunk_sent, HANDED_OVER], ProducerState.OVER),
    "over without READY": ([ABORTED], ProducerState.OVER),
}

DONE: list[Instruction] = [ReportFinishedSending()]
NOTHING: list[Instruction] = []
LET_GO: list[Instruction] = [finished(ProducerEnd.ABORTED, 0, reason="let go"), ReportFailedSending("let go")]
LET_GO_LATER: list[Instruction] = [finished(ProducerEnd.ABORTED, 1, reason="let go"), ReportFailedSending("let go")]

TABLE: list[tuple[str, str, Event, list[Instruction], ProducerState]] = [
    # AWAITING_READY
    ("awaiting", "ready", ready(), [ReportReady()], ProducerState.SENDING),
    ("awaiting", "computed", computed(10), NOTHING, ProducerState.AWAITING_READY),
    ("awaiting", "handed over", HANDED_OVER, DONE, ProducerState.OVER),
    ("awaiting", "finished here", FINISHED_HERE, DONE, ProducerState.OVER),
    ("awaiting", "aborted", ABORTED, DONE, ProducerState.OVER),
    ("awaiting", "cancel", cancel, NOTHING, ProducerState.AWAITING_READY),
    ("awaiting", "link lost", link_lost, [ReportFailedSending("cut")], ProducerState.GIVEN_UP),
    ("awaiting", "early time", time_is(DEADLINE_S - 0.001), NOTHING, ProducerState.AWAITING_READY),
    ("awaiting", "deadline", time_is(DEADLINE_S), [ReportFailedSending(NO_READY)], ProducerState.UNANSWERED),
    # SENDING
    ("sending", "ready again", ready(2), NOTHING, ProducerState.SENDING),
    ("sending", "less than a block", computed(3), NOTHING, ProducerState.SENDING),
    ("sending", "one whole block", computed(7), [SendBlocks(0, (9,))], ProducerState.SENDING),
    ("sending", "one token short", computed(9), [SendBlocks(0, (9, 4))], ProducerState.SENDING),
    ("sending", "all of the prompt", computed(10), [SendBlocks(0, BLOCKS)], ProducerState.SENDING),
    ("sending", "more than the prompt", computed(11), [SendBlocks(0, BLOCKS)], ProducerState.SENDING),
    (
        "sending",
        "handed over",
        HANDED_OVER,
        [finished(ProducerEnd.HANDED_OVER, 0, 42), ReportFinishedSending()],
        ProducerState.OVER,
    ),
    (
        "sending",
        "finished here",
        FINISHED_HERE,
        [finished(ProducerEnd.FINISHED_HERE, 0), ReportFinishedSending()],
        ProducerState.OVER,
    ),
    ("sending", "aborted", ABORTED, [finished(ProducerEnd.ABORTED, 0), ReportFinishedSending()], ProducerState.OVER),
    ("sending", "cancel", cancel, LET_GO, ProducerState.GIVEN_UP),
    ("sending", "link lost", link_lost, [ReportFailedSending("cut")], ProducerState.GIVEN_UP),
    ("sending", "deadline", time_is(DEADLINE_S), NOTHING, ProducerState.SENDING),
    # SENDING, with a chunk that was announced and has not left
    ("sending, a chunk on its way", "same again", computed(5), NOTHING, ProducerState.SENDING),
    ("sending, a chunk on its way", "the rest", computed(10), [SendBlocks(1, (4, 7))], ProducerState.SENDING),
    ("sending, a chunk on its way", "chunk sent", chunk_sent, NOTHING, ProducerState.SENDING),
    (
        "sending, a chunk on its way",
        "handed over",
        HANDED_OVER,
        [finished(ProducerEnd.HANDED_OVER, 1, 42)],
        ProducerState.FINISHING,
    ),
    (
        "sending, a chunk on its way",
        "finished here",
        FINISHED_HERE,
        [finished(ProducerEnd.FINISHED_HERE, 1)],
        ProducerState.FINISHING,
    ),
    ("sending, a chunk on its way", "aborted", ABORTED, [finished(ProducerEnd.ABORTED, 1)], ProducerState.FINISHING),
    ("sending, a chunk on its way", "cancel", cancel, LET_GO_LATER, ProducerState.GIVEN_UP),
    ("sending, a chunk on its way", "link lost", link_lost, [ReportFailedSending("cut")], ProducerState.GIVEN_UP),
    # SENDING, with chunks whose turn has not come: only a consumer that goes on gets them
    ("sending, a chunk queued", "its turn", announced, NOTHING, ProducerState.SENDING),
    (
        "sending, a chunk queued",
        "handed over",
        HANDED_OVER,
        [finished(ProducerEnd.HANDED_OVER, 1, 42)],
        ProducerState.FINISHING,
    ),
    (
        "sending, a chunk queued",
        "finished here",
        FINISHED_HERE,
        [DropQueued(), finished(ProducerEnd.FINISHED_HERE, 0), ReportFinishedSending()],
        ProducerState.OVER,
    ),
    (
        "sending, a chunk queued",
        "aborted",
        ABORTED,
        [DropQueued(), finished(ProducerEnd.ABORTED, 0), ReportFinishedSending()],
        ProducerState.OVER,
    ),
    ("sending, a chunk queued", "cancel", cancel, [DropQueued(), *LET_GO], ProducerState.GIVEN_UP),
    ("sending, a chunk queued", "link lost", link_lost, [ReportFailedSending("cut")], ProducerState.GIVEN_UP),
    (
        "sending, one chunk announced, one queued",
        "cancel",
        cancel,
        [DropQueued(), *LET_GO_LATER],
        ProducerState.GIVEN_UP,
    ),
    (
        "sending, one chunk announced, one queued",
        "aborted",
        ABORTED,
        [DropQueued(), finished(ProducerEnd.ABORTED, 1)],
        ProducerState.FINISHING,
    ),
    # SENDING, the request has ended and FINISHED has promised what is queued
    (
        "finishing, one chunk announced, one queued",
        "cancel",
        cancel,
        [DropQueued(), finished(ProducerEnd.ABORTED, 1, reason="let go")],
        ProducerState.FINISHING,
    ),
    ("finishing, one chunk announced, one queued", "link lost", link_lost, DONE, ProducerState.OVER),
    (
        "finishing, one chunk announced, one queued",
        "chunk sent",
        chunk_sent,
        NOTHING,
        ProducerState.FINISHING,
    ),
    (
        "finishing, a chunk queued",
        "cancel",
        cancel,
        [DropQueued(), finished(ProducerEnd.ABORTED, 0, reason="let go"), ReportFinishedSending()],
        ProducerState.OVER,
    ),
    ("finishing, a chunk queued", "link lost", link_lost, DONE, ProducerState.OVER),
    # SENDING, the request has ended
    ("finishing, a chunk on its way", "ready", ready(), NOTHING, ProducerState.FINISHING),
    ("finishing, a chunk on its way", "computed", computed(10), NOTHING, ProducerState.FINISHING),
    ("finishing, a chunk on its way", "finished again", ABORTED, NOTHING, ProducerState.FINISHING),
    ("finishing, a chunk on its way", "chunk sent", chunk_sent, DONE, ProducerState.OVER),
    ("finishing, a chunk on its way", "cancel", cancel, NOTHING, ProducerState.FINISHING),
    ("finishing, a chunk on its way", "link lost", link_lost, DONE, ProducerState.OVER),
    ("finishing, a chunk on its way", "deadline", time_is(DEADLINE_S), NOTHING, ProducerState.FINISHING),
    # GIVEN_UP for want of READY
    ("unanswered", "ready", ready(), [finished(ProducerEnd.ABORTED, 0, reason=LATE)], ProducerState.GIVEN_UP),
    ("unanswered", "computed", computed(10), NOTHING, ProducerState.UNANSWERED),
    ("unanswered", "aborted", ABORTED, DONE, ProducerState.OVER),
    ("unanswered", "cancel", cancel, NOTHING, ProducerState.UNANSWERED),
    ("unanswered", "link lost", link_lost, NOTHING, ProducerState.GIVEN_UP),
    ("unanswered", "deadline again", time_is(DEADLINE_S + 1), NOTHING, ProducerState.UNANSWERED),
    # GIVEN_UP because the consumer let go
    ("given up: cancelled", "ready", ready(), NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled", "computed", computed(10), NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled", "handed over", HANDED_OVER, DONE, ProducerState.OVER),
    ("given up: cancelled", "aborted", ABORTED, DONE, ProducerState.OVER),
    ("given up: cancelled", "cancel again", cancel, NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled", "link lost", link_lost, NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled", "deadline", time_is(DEADLINE_S), NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled, a chunk on its way", "computed", computed(10), NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled, a chunk on its way", "chunk sent", chunk_sent, NOTHING, ProducerState.GIVEN_UP),
    ("given up: cancelled, a chunk on its way", "aborted", ABORTED, NOTHING, ProducerState.FINISHING),
    ("given up: cancelled, a chunk on its way", "link lost", link_lost, NOTHING, ProducerState.GIVEN_UP),
    # GIVEN_UP because the link is dead: what was on its way will not be waited for
    ("given up: link lost", "ready", ready(), NOTHING, ProducerState.GIVEN_UP),
    ("given up: link lost", "computed", computed(10), NOTHING, ProducerState.GIVEN_UP),
    ("given up: link lost", "handed over", HANDED_OVER, DONE, ProducerState.OVER),
    ("given up: link lost", "aborted", ABORTED, DONE, ProducerState.OVER),
    ("given up: link lost", "cancel", cancel, NOTHING, ProducerState.GIVEN_UP),
    ("given up: link lost", "link lost again", link_lost, NOTHING, ProducerState.GIVEN_UP),
    ("given up: link lost", "deadline", time_is(DEADLINE_S), NOTHING, ProducerState.GIVEN_UP),
    # OVER
    *[
        (state, name, event, NOTHING, ProducerState.OVER)
        for state in ("over", "over without READY")
        for name, event in {
            "ready": ready(),
            "computed": computed(10),
            "finished again": ABORTED,
            "chunk sent": chunk_sent,
            "cancel": cancel,
            "link lost": link_lost,
            "deadline": time_is(DEADLINE_S),
        }.items()
    ],
]


@pytest.mark.parametrize(
    ("state", "event", "expected", "next_state"),
    [pytest.param(*row[:1], *row[2:], id=f"{row[0]} + {row[1]}") for row in TABLE],
)
def test_an_event_in_a_state_has_exactly_these_instructions(
    state: str, event: Event, expected: list[Instruction], next_state: ProducerState
) -> None:
    transfer = new_transfer()
    history, reached = STATES[state]
    for past in history:
        past(transfer)
    assert transfer.state is reached
    assert event(transfer) == expected
    assert transfer.state is next_state


def test_blocks_that_the_consumer_has_are_not_sent() -> None:
    transfer = new_transfer()
    ready(first_block=1)(transfer)
    assert computed(5)(transfer) == []
    assert computed(10)(transfer) == [SendBlocks(1, (4, 7))]


def test_a_consumer_that_has_every_block_gets_only_the_token() -> None:
    transfer = new_transfer()
    ready(first_block=3)(transfer)
    assert computed(10)(transfer) == []
    assert HANDED_OVER(transfer) == [finished(ProducerEnd.HANDED_OVER, 0, 42), ReportFinishedSending()]


def test_what_is_computed_leaves_in_chunks_of_at_most_so_many_blocks() -> None:
    transfer = new_transfer(max_chunk_blocks=2)
    ready()(transfer)
    assert computed(10)(transfer) == [SendBlocks(0, (9, 4)), SendBlocks(2, (7,))]
    assert HANDED_OVER(transfer) == [finished(ProducerEnd.HANDED_OVER, 2, 42)]


def test_every_chunk_counts_before_the_blocks_are_let_go() -> None:
    transfer = new_transfer()
    for event in (ready(), computed(4), announced, computed(8), computed(10)):
        event(transfer)
    assert chunk_sent(transfer) == []
    assert HANDED_OVER(transfer) == [finished(ProducerEnd.HANDED_OVER, 3, 42)]
    for event in (announced, chunk_sent, announced):
        assert event(transfer) == []
    assert chunk_sent(transfer) == DONE


def test_what_was_promised_is_taken_back_once() -> None:
    transfer = new_transfer(max_chunk_blocks=1)
    for event in (ready(), computed(10), announced, HANDED_OVER):
        event(transfer)
    assert cancel(transfer) == [DropQueued(), finished(ProducerEnd.ABORTED, 1, reason="let go")]
    assert cancel(transfer) == []
    assert chunk_sent(transfer) == DONE


def test_a_cancelled_transfer_lets_its_blocks_go_when_the_chunk_has_left() -> None:
    transfer = new_transfer()
    for event in (ready(), computed(5), announced, cancel, ABORTED):
        event(transfer)
    assert chunk_sent(transfer) == DONE
    assert transfer.state is ProducerState.OVER


def test_a_late_ready_is_answered_once() -> None:
    transfer = new_transfer()
    time_is(DEADLINE_S)(transfer)
    assert ready()(transfer) == [finished(ProducerEnd.ABORTED, 0, reason=LATE)]
    assert ready()(transfer) == []
    assert ABORTED(transfer) == DONE


def test_a_consumer_with_another_prompt_breaks_the_protocol() -> None:
    transfer = new_transfer()
    with pytest.raises(ProtocolViolation, match="expects 11 prompt tokens, the producer has 10"):
        ready(num_prompt_tokens=11)(transfer)
    assert transfer.is_awaiting_ready


def test_a_consumer_with_another_adapter_breaks_the_protocol() -> None:
    transfer = new_transfer()
    transfer.content_hash = b"base model"
    with pytest.raises(ProtocolViolation, match="adapters"):
        transfer.on_ready(Ready("t", 3, 0, 10, content_hash=b"sql@1f"))
    assert transfer.is_awaiting_ready
    assert transfer.on_ready(Ready("t", 3, 0, 10, content_hash=b"base model")) == [ReportReady()]


def test_only_a_transfer_that_awaits_ready_has_a_deadline() -> None:
    for state, (history, reached) in STATES.items():
        transfer = new_transfer()
        for event in history:
            event(transfer)
        assert transfer.is_awaiting_ready == (reached is ProducerState.AWAITING_READY), state


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((link_lost,), TransferFailure.LINK_LOST),
        ((time_is(DEADLINE_S),), TransferFailure.NO_RESERVATION),
        ((ready(), cancel), TransferFailure.CONSUMER_CANCELLED),
        ((ready(), computed(5), link_lost), TransferFailure.LINK_LOST),
    ],
)
def test_a_failure_has_a_kind_of_its_own(events: tuple[Event, ...], failure: TransferFailure) -> None:
    transfer = new_transfer()
    *_, last = [event(transfer) for event in events]
    assert [one for one in last if isinstance(one, ReportFailedSending)]
    assert transfer.failure is failure


def test_the_recurrent_state_follows_the_prompts_last_block() -> None:
    transfer = new_transfer()
    transfer.num_state_blocks = 2
    blocks = (*BLOCKS, 30, 31)
    ready()(transfer)
    # The state changes with each step until all of the prompt is computed.
    assert transfer.on_computed(blocks, 9) == [SendBlocks(0, (9, 4))]
    assert transfer.on_computed(blocks, 10) == [SendBlocks(2, (7, 30, 31))]
    assert transfer.on_computed(blocks, 11) == []
