"""The measured times of starts and drains."""

from __future__ import annotations

from cluster.planning.fleet_change import SwitchTimes
from cluster.reconciling.switch_clock import SwitchClock


def test_the_longest_of_the_newest_starts_and_drains_counts() -> None:
    clock = SwitchClock()
    assert clock.times == SwitchTimes(start_s=60.0, drain_s=10.0), "guesses before the first measurement"
    for seconds in (100.0, *[20.0] * 7, 30.0):
        clock.note_start(seconds)
    clock.note_drain(2.0)
    assert clock.times == SwitchTimes(start_s=30.0, drain_s=2.0)
