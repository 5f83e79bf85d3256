"""A transfer's story: its last events, with their times, in one line."""

from __future__ import annotations

from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.handoff.control_messages import Ready
from kv_transfer.handoff.producer_machine import ProducerEvent, ProducerMachine, ProducerState
from kv_transfer.handoff.transfer_story import TransferStory


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_events_are_told_in_their_order_with_the_times_since_the_start() -> None:
    clock = Clock()
    machine = ProducerMachine("t-a", 2, 10, 4, 1, 100.0, story=TransferStory(clock))
    clock.now_s = 10.25
    machine.on_ready(Ready("t-a", 2, 0, 10))
    clock.now_s = 10.5
    machine.on_finish(ProducerEnd.ABORTED, None)
    clock.now_s = 11.0
    assert machine.tell() == (
        "t-a, attempt 2, producer: +0.250 s: READY in AWAITING_READY; +0.500 s: REQUEST_ENDED in SENDING; "
        "+1.000 s: now OVER"
    )


def test_events_that_take_turns_are_counted() -> None:
    clock = Clock()
    story = TransferStory(clock)
    for _ in range(1000):
        story.add(ProducerEvent.COMPUTED, ProducerState.SENDING)
        clock.now_s += 0.001
        story.add(ProducerEvent.CHUNK_SENT, ProducerState.SENDING)
    assert story.tell(ProducerState.SENDING) == (
        "+0.000 s to +0.999 s: 1000 x COMPUTED in SENDING; +0.001 s to +1.000 s: 1000 x CHUNK_SENT in SENDING; "
        "+1.000 s: now SENDING"
    )


def test_a_story_keeps_the_last_events_only() -> None:
    story = TransferStory(Clock())
    turns = [ProducerEvent.COMPUTED, ProducerEvent.CHUNK_SENT, ProducerEvent.CANCEL]
    for number in range(3000):
        story.add(turns[number % 3], ProducerState.SENDING)
    told = story.tell(ProducerState.SENDING).split("; ")
    assert len(told) == 33
    assert told[-2] == "+0.000 s: CANCEL in SENDING"
