from __future__ import annotations

from actors.recording.read_clock import ReadClock, ReplayedClock


def test_readings_of_a_recorded_call_are_kept_and_those_between_calls_are_not() -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    clock = ReadClock(lambda: next(times))
    assert clock() == 1.0
    assert clock.begin()
    assert (clock(), clock()) == (2.0, 3.0)
    assert not clock.begin(), "a call within another one is a part of it"
    assert clock.end() == (2.0, 3.0)
    assert clock() == 4.0
    assert clock.end() == ()


def test_a_replayed_clock_says_the_same_and_counts_what_was_asked() -> None:
    clock = ReplayedClock()
    clock.load([2.0, 3.0])
    used = [clock.is_used_up]
    assert (clock(), clock()) == (2.0, 3.0)
    used.append(clock.is_used_up)
    assert clock() == 3.0
    used.append(clock.is_used_up)
    assert used == [False, True, False], "the last time it was read once more than the recorded one"
    clock.load([])
    assert clock() == 0.0
