"""The events of a start."""

from __future__ import annotations

from cluster.pool.engines.start_progress import ProgressLog


def test_a_caller_gets_the_events_that_it_has_not_got_yet() -> None:
    log = ProgressLog()
    assert log.after(0) == []
    log.say("loading")
    log.say("warming up")
    assert (log.after(0), log.after(1), log.after(2)) == (["loading", "warming up"], ["warming up"], [])
