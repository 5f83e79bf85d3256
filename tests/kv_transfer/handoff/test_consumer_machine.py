"""Every event in every state of a consumer's transfer, with all that it answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.consumer_machine import ConsumerMachine
from kv_transfer.handoff.control_messages import Cancel, Chunk, Finished, Ready
from kv_transfer.handoff.instructions import Instruction, ReceiveBlocks, ReportReceived, Send
from kv_transfer.transfer_stats import TransferFailure, TransferTimings

BLOCKS = (5, 2, 8, 3)
"""For 14 tokens in blocks of 4: the first is here already, the last is partial."""

Event = Callable[[ConsumerMachine], list[Instruction]]


def new_transfer(num_local_blocks: int = 1) -> ConsumerMachine:
    return ConsumerMachine(
        transfer_id="t",
        attempt=3,
        block_ids=BLOCKS,
        num_local_blocks=num_local_blocks,
        num_prompt_tokens=14,
        block_size=4,
        block_size_bytes=100,
        drain_timeout_s=10.0,
    )


def chunk(first_block: int, num_blocks: int, now_s: float = 1.0) -> Event:
    return lambda transfer: transfer.on_chunk(Chunk("t", 3, first_block, num_blocks), now_s)


def received(num_blocks: int, now_s: float = 3.0) -> Event:
    return lambda transfer: transfer.on_chunk_received(num_blocks, now_s)


def finished(end: ProducerEnd, num_chunks: int, reason: str = "", now_s: float = 2.0) -> Event:
    first_token_id = 42 if end is ProducerEnd.HANDED_OVER else None
    return lambda transfer: transfer.on_finished(Finished("t", 3, end, num_chunks, first_token_id, reason), now_s)


def handed_over(num_chunks: int) -> Event:
    return finished(ProducerEnd.HANDED_OVER, num_chunks)


def cancel(transfer: ConsumerMachine) -> list[Instruction]:
    return transfer.on_cancel(1.5)


def link_lost(transfer: ConsumerMachine) -> list[Instruction]:
    return transfer.on_link_lost("cut")


def report(outcome: LoadOutcome, num_valid_tokens: int, timings: TransferTimings | None = None) -> list[Instruction]:
    token_id = 42 if outcome is LoadOutcome.LOADED else None
    return [ReportReceived(ReceivedKV(outcome, num_valid_tokens, first_token_id=token_id, timings=timings))]


def failed(num_valid_tokens: int, reason: str, timings: TransferTimings | None = None) -> list[Instruction]:
    return [ReportReceived(ReceivedKV(LoadOutcome.FAILED, num_valid_tokens, reason=reason, timings=timings))]


def cut(outcome: LoadOutcome, num_valid_tokens: int) -> list[Instruction]:
    return [ReportReceived(ReceivedKV(outcome, num_valid_tokens, reason="cut"))]


def timings(num_blocks: int, num_chunks: int, transfer_s: float, exposed_s: float) -> TransferTimings:
    return TransferTimings(num_blocks, num_blocks * 100, num_chunks, transfer_s, exposed_s)


NO_CHUNKS = timings(0, 0, 0.0, 0.0)
NOTHING: list[Instruction] = []
CANCEL: list[Instruction] = [Send(Cancel("t", 3))]
LOADED = report(LoadOutcome.LOADED, 14, timings(3, 1, 2.0, 1.0))

STATES: dict[str, list[Event]] = {
    "waiting": [],
    "receiving": [chunk(1, 2)],
    "everything received": [chunk(1, 3), received(3, now_s=1.5)],
    "finished, receiving": [chunk(1, 3), handed_over(1)],
    "finished, a chunk owed": [chunk(1, 2), handed_over(2)],
    "finished, everything owed": [handed_over(1)],
    "cancelled": [cancel],
    "cancelled, finished, a chunk owed": [chunk(1, 2), handed_over(2), cancel],
    "cancelled, receiving": [chunk(1, 2), cancel],
    "cancelled, finished, receiving": [chunk(1, 2), cancel, finished(ProducerEnd.ABORTED, 1, "let go")],
    "over": [chunk(1, 3), handed_over(1), received(3)],
    "over, link lost": [link_lost],
}

TABLE: list[tuple[str, str, Event, list[Instruction]]] = [
    ("waiting", "first chunk", chunk(1, 2), [ReceiveBlocks((2, 8))]),
    ("waiting", "one chunk for all", chunk(1, 3), [ReceiveBlocks((2, 8, 3))]),
    ("waiting", "finished here", finished(ProducerEnd.FINISHED_HERE, 0), report(LoadOutcome.RELEASED, 4, NO_CHUNKS)),
    (
        "waiting",
        "aborted without a reason",
        finished(ProducerEnd.ABORTED, 0),
        failed(4, "the producer gave the request up", NO_CHUNKS),
    ),
    ("waiting", "aborted with a reason", finished(ProducerEnd.ABORTED, 0, "no"), failed(4, "no", NO_CHUNKS)),
    ("waiting", "cancel", cancel, CANCEL),
    ("waiting", "link lost", link_lost, cut(LoadOutcome.FAILED, 4)),
    ("receiving", "next chunk", chunk(3, 1), [ReceiveBlocks((3,))]),
    ("receiving", "chunk received", received(2), NOTHING),
    ("receiving", "handed over", handed_over(1), NOTHING),
    ("receiving", "finished here", finished(ProducerEnd.FINISHED_HERE, 1), NOTHING),
    ("receiving", "aborted", finished(ProducerEnd.ABORTED, 1), NOTHING),
    ("receiving", "cancel", cancel, CANCEL),
    ("receiving", "link lost", link_lost, cut(LoadOutcome.FAILED, 4)),
    ("everything received", "handed over", handed_over(1), report(LoadOutcome.LOADED, 14, timings(3, 1, 1.0, 0.0))),
    (
        "everything received",
        "finished here",
        finished(ProducerEnd.FINISHED_HERE, 1),
        report(LoadOutcome.RELEASED, 14, timings(3, 1, 1.0, 0.0)),
    ),
    ("everything received", "cancel", cancel, CANCEL),
    ("everything received", "link lost", link_lost, cut(LoadOutcome.FAILED, 14)),
    ("finished, receiving", "last chunk received", received(3), LOADED),
    ("finished, receiving", "finished again", finished(ProducerEnd.ABORTED, 7), NOTHING),
    ("finished, receiving", "cancel", cancel, NOTHING),
    ("finished, receiving", "link lost", link_lost, cut(LoadOutcome.FAILED, 4)),
    ("finished, a chunk owed", "the chunk", chunk(3, 1), [ReceiveBlocks((3,))]),
    ("finished, a chunk owed", "chunk received", received(2), NOTHING),
    ("finished, a chunk owed", "cancel", cancel, CANCEL),
    ("finished, a chunk owed", "the same again", handed_over(2), NOTHING),
    ("finished, a chunk owed", "taken back", finished(ProducerEnd.ABORTED, 1, "no"), NOTHING),
    ("finished, a chunk owed", "link lost", link_lost, cut(LoadOutcome.FAILED, 4)),
    ("finished, everything owed", "first chunk", chunk(1, 3), [ReceiveBlocks((2, 8, 3))]),
    ("finished, everything owed", "taken back", finished(ProducerEnd.ABORTED, 0, "no"), failed(4, "no", NO_CHUNKS)),
    ("cancelled, finished, a chunk owed", "the chunk", chunk(3, 1), [ReceiveBlocks((3,))]),
    ("cancelled, finished, a chunk owed", "cancel again", cancel, NOTHING),
    ("cancelled, finished, a chunk owed", "taken back", finished(ProducerEnd.ABORTED, 1, "no"), NOTHING),
    ("cancelled, finished, a chunk owed", "link lost", link_lost, cut(LoadOutcome.CANCELLED, 4)),
    ("cancelled", "chunk", chunk(1, 1), [ReceiveBlocks((2,))]),
    ("cancelled", "finished", finished(ProducerEnd.ABORTED, 0, "x"), report(LoadOutcome.CANCELLED, 4, NO_CHUNKS)),
    ("cancelled", "handed over", handed_over(0), report(LoadOutcome.CANCELLED, 4, NO_CHUNKS)),
    ("cancelled", "cancel again", cancel, NOTHING),
    ("cancelled", "link lost", link_lost, cut(LoadOutcome.CANCELLED, 4)),
    ("cancelled, receiving", "next chunk", chunk(3, 1), [ReceiveBlocks((3,))]),
    ("cancelled, receiving", "chunk received", received(2), NOTHING),
    ("cancelled, receiving", "finished", finished(ProducerEnd.ABORTED, 1, "let go"), NOTHING),
    ("cancelled, receiving", "link lost", link_lost, cut(LoadOutcome.CANCELLED, 4)),
    (
        "cancelled, finished, receiving",
        "chunk received",
        received(2),
        report(LoadOutcome.CANCELLED, 12, timings(2, 1, 2.0, 1.0)),
    ),
    ("cancelled, finished, receiving", "cancel again", cancel, NOTHING),
    ("cancelled, finished, receiving", "link lost", link_lost, cut(LoadOutcome.CANCELLED, 4)),
    *[
        (state, name, event, NOTHING)
        for state in ("over", "over, link lost")
        for name, event in {"cancel": cancel, "link lost": link_lost}.items()
    ],
    ("over", "finished again", handed_over(1), NOTHING),
]


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [pytest.param(row[0], row[2], row[3], id=f"{row[0]} + {row[1]}") for row in TABLE],
)
def test_an_event_in_a_state_has_exactly_these_instructions(
    state: str, event: Event, expected: list[Instruction]
) -> None:
    transfer = new_transfer()
    for past in STATES[state]:
        past(transfer)
    was_over = transfer.is_over
    assert event(transfer) == expected
    has_reported = any(isinstance(instruction, ReportReceived) for instruction in expected)
    assert transfer.is_over == (was_over or has_reported)


@pytest.mark.parametrize(
    ("state", "event", "says"),
    [
        ("waiting", chunk(0, 1), "announced 1 blocks from block 0 on; the next block is 1 of 4"),
        ("waiting", chunk(2, 1), "announced 1 blocks from block 2 on; the next block is 1 of 4"),
        ("waiting", chunk(1, 0), "announced 0 blocks from block 1 on"),
        ("waiting", chunk(1, 4), "announced 4 blocks from block 1 on"),
        ("receiving", chunk(1, 2), "announced 2 blocks from block 1 on; the next block is 3"),
        ("finished, receiving", chunk(4, 1), "announced 1 blocks from block 4 on"),
        ("cancelled, finished, receiving", chunk(3, 1), "announced 1 blocks from block 3 on"),
        ("waiting", handed_over(0), "handed the request over after sending the KV of 4 of its 14 prompt tokens"),
        ("finished, a chunk owed", chunk(1, 1), "announced 1 blocks from block 1 on; the next block is 3"),
        (
            "finished, a chunk owed",
            finished(ProducerEnd.ABORTED, 0),
            "FINISHED counts 0 chunks, but the producer has announced 1",
        ),
        ("receiving", handed_over(0), "FINISHED counts 0 chunks, but the producer has announced 1"),
    ],
)
def test_what_contradicts_the_announcements_breaks_the_protocol(state: str, event: Event, says: str) -> None:
    transfer = new_transfer()
    for past in STATES[state]:
        past(transfer)
    with pytest.raises(ProtocolViolation, match=says):
        event(transfer)
    assert not transfer.is_over, "the link's end reports"


def test_a_violation_ends_in_one_report_when_the_link_is_dead() -> None:
    transfer = new_transfer()
    for past in (chunk(1, 1), handed_over(1)):
        past(transfer)
    with pytest.raises(ProtocolViolation, match="sending the KV of 8 of its 14"):
        received(1)(transfer)
    assert link_lost(transfer) == cut(LoadOutcome.FAILED, 8)
    assert link_lost(transfer) == []


def test_ready_names_the_first_block_that_is_not_here() -> None:
    assert new_transfer().start() == [Send(Ready("t", 3, 1, 14))]


def test_a_prompt_that_is_all_here_needs_only_the_token() -> None:
    transfer = new_transfer(num_local_blocks=4)
    assert handed_over(0)(transfer) == report(LoadOutcome.LOADED, 14, NO_CHUNKS)


def test_valid_tokens_are_a_prefix_that_ends_with_the_prompt() -> None:
    transfer = new_transfer(num_local_blocks=0)
    chunk(0, 4)(transfer)
    assert transfer.num_valid_tokens == 0
    received(3)(transfer)
    assert transfer.num_valid_tokens == 12
    received(1)(transfer)
    assert transfer.num_valid_tokens == 14


def test_a_cancel_has_a_deadline_until_it_is_answered() -> None:
    transfer = new_transfer()
    assert not transfer.is_overdue(1e9)
    cancel(transfer)
    assert not transfer.is_overdue(11.4)
    assert transfer.is_overdue(11.5)
    finished(ProducerEnd.ABORTED, 0)(transfer)
    assert not transfer.is_overdue(1e9)


@pytest.mark.parametrize("answer", [chunk(3, 1), finished(ProducerEnd.ABORTED, 1)], ids=["chunk", "taken back"])
def test_a_cancel_while_chunks_are_owed_has_a_deadline_until_none_is(answer: Event) -> None:
    transfer = new_transfer()
    for event in (cancel, chunk(1, 2), handed_over(2)):
        event(transfer)
    assert transfer.is_overdue(11.5), "FINISHED alone does not say that the rest will come"
    answer(transfer)
    assert not transfer.is_overdue(1e9)


def test_what_was_taken_back_is_not_waited_for() -> None:
    transfer = new_transfer()
    for event in (chunk(1, 2), handed_over(2), cancel, finished(ProducerEnd.ABORTED, 1)):
        event(transfer)
    assert received(2)(transfer) == report(LoadOutcome.CANCELLED, 12, timings(2, 1, 2.0, 1.0))


def test_chunks_after_finished_complete_the_load() -> None:
    transfer = new_transfer()
    for event in (handed_over(3), chunk(1, 1), chunk(2, 1), received(1), chunk(3, 1), received(1)):
        assert not transfer.is_over
        event(transfer)
    assert received(1, now_s=5.0)(transfer) == report(LoadOutcome.LOADED, 14, timings(3, 3, 4.0, 3.0))


def corrupt(num_blocks: int) -> Event:
    return lambda transfer: transfer.on_chunk_received(num_blocks, 3.0, is_intact=False)


def test_nothing_from_the_first_corrupt_chunk_on_is_valid_and_the_rest_is_drained() -> None:
    transfer = new_transfer(num_local_blocks=0)
    for event in (chunk(0, 1), chunk(1, 1), chunk(2, 2), handed_over(3), received(1), corrupt(1)):
        event(transfer)
    assert not transfer.is_over
    assert received(2)(transfer) == failed(4, "t: chunk 1 was corrupted on its way", timings(1, 3, 2.0, 1.0))


def test_the_first_corrupt_chunk_is_the_one_that_is_named() -> None:
    transfer = new_transfer()
    for event in (chunk(1, 1), chunk(2, 2), handed_over(2), corrupt(1)):
        event(transfer)
    assert corrupt(2)(transfer) == failed(4, "t: chunk 0 was corrupted on its way", timings(0, 2, 2.0, 1.0))


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(cancel, LoadOutcome.CANCELLED), (finished(ProducerEnd.FINISHED_HERE, 1), LoadOutcome.RELEASED)],
    ids=["cancelled", "released"],
)
def test_a_corrupt_chunk_of_a_load_that_nobody_wants_only_ends_its_prefix(end: Event, outcome: LoadOutcome) -> None:
    transfer = new_transfer()
    for event in (chunk(1, 3), end, finished(ProducerEnd.ABORTED, 1)):
        event(transfer)
    assert corrupt(3)(transfer) == report(outcome, 4, timings(0, 1, 2.0, 1.0))


def test_a_link_that_dies_after_a_corrupt_chunk_leaves_what_came_before_it() -> None:
    transfer = new_transfer()
    for event in (chunk(1, 1), chunk(2, 1), received(1), corrupt(1)):
        event(transfer)
    assert link_lost(transfer) == cut(LoadOutcome.FAILED, 8)


def test_a_cancel_whose_link_dies_has_no_deadline_any_more() -> None:
    transfer = new_transfer()
    cancel(transfer)
    link_lost(transfer)
    assert transfer.deadline_s is None


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((link_lost,), TransferFailure.LINK_LOST),
        ((chunk(1, 2), handed_over(2), link_lost), TransferFailure.LINK_LOST),
        ((finished(ProducerEnd.ABORTED, 0),), TransferFailure.PRODUCER_GAVE_UP),
        ((chunk(1, 3), handed_over(1), corrupt(3)), TransferFailure.CORRUPT),
    ],
)
def test_a_failure_has_a_kind_of_its_own(events: tuple[Event, ...], failure: TransferFailure) -> None:
    transfer = new_transfer()
    *_, [last] = [event(transfer) for event in events]
    assert isinstance(last, ReportReceived)
    assert (last.received.outcome, transfer.failure) == (LoadOutcome.FAILED, failure)


def _with_state() -> ConsumerMachine:
    transfer = new_transfer(num_local_blocks=0)
    transfer.block_ids, transfer.num_state_blocks = (*BLOCKS, 30, 31), 2
    return transfer


def test_a_handoff_with_a_recurrent_state_is_loaded_with_all_of_the_state() -> None:
    transfer = _with_state()
    assert chunk(0, 6)(transfer) == [ReceiveBlocks((*BLOCKS, 30, 31))]
    handed_over(1)(transfer)
    assert received(6)(transfer) == report(LoadOutcome.LOADED, 14, timings(6, 1, 2.0, 1.0))


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_a_handoff_without_all_of_the_recurrent_state_breaks_the_protocol(num_blocks: int) -> None:
    transfer = _with_state()
    chunk(0, num_blocks)(transfer)
    handed_over(1)(transfer)
    with pytest.raises(ProtocolViolation, match="without all of its recurrent state"):
        received(num_blocks)(transfer)
