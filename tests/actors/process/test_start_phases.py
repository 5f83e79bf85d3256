"""Tests of actors/process/start_phases.py."""

from __future__ import annotations

from actors.process.start_phases import StartPhases


def test_each_phase_lasts_until_the_next_one_and_equal_ones_are_added_up() -> None:
    now_s = [10.0]
    phases = StartPhases(lambda: now_s[0])
    assert phases.present == "starting"
    assert phases.durations_s() == {}
    for phase, lasts_s in (("loading weights", 2.5), ("warming up", 1.0), ("loading weights", 0.25), ("serving", 9.0)):
        phases.begin(phase)
        now_s[0] += lasts_s
    assert phases.present == "serving"
    assert phases.durations_s() == {"starting": 0.0, "loading weights": 2.75, "warming up": 1.0}
