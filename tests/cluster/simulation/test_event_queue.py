from __future__ import annotations

import pytest

from cluster.simulation.event_queue import EventQueue


def test_events_come_in_the_order_of_their_times_and_then_of_their_calls() -> None:
    events, seen = EventQueue(), list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, events.clock()))

    events.at(2.0, note, "late")
    events.at(1.0, note, "first")
    events.at(1.0, note, "second")
    events.at_end_of_step(1.0, 7, note, "step of engine 7")
    events.at_end_of_step(1.0, 3, note, "step of engine 3")
    events.at(1.5, lambda: events.at(1.5, note, "at once"))
    events.at(9.0, note, "never")
    events.run(5.0, lambda: False)

    assert seen == [
        ("step of engine 3", 1.0),
        ("step of engine 7", 1.0),
        ("first", 1.0),
        ("second", 1.0),
        ("at once", 1.5),
        ("late", 2.0),
    ]


def test_a_run_ends_when_it_is_done() -> None:
    events, seen = EventQueue(), list[int]()
    for number in range(5):
        events.at(float(number), seen.append, number)
    events.run(float("inf"), lambda: len(seen) == 3)
    assert seen == [0, 1, 2]


def test_nothing_can_be_put_into_the_past() -> None:
    events = EventQueue()
    events.at(2.0, lambda: None)
    events.run(3.0, lambda: False)
    with pytest.raises(AssertionError, match=r"1\.0 has passed"):
        events.at(1.0, lambda: None)
