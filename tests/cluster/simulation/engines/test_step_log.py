from __future__ import annotations

import numpy as np
import pytest

from actors.core.outputs.engine_core_outputs import DecodedTokens
from cluster.simulation.engines.step_log import StepLog


def test_a_request_has_the_times_of_the_steps_since_it_began() -> None:
    log = StepLog()
    log.add(1.0)
    log.add(2.0)
    log.open("r")
    log.add_all(np.array([3.0, 5.0]))
    log.add(6.0)

    assert log.is_open("r")
    assert log.close("r", 2).tolist() == [2.0, 3.0, 5.0]
    assert not log.is_open("r")


def test_old_steps_are_forgotten_but_for_those_of_open_requests() -> None:
    log = StepLog()
    log.add_all(np.arange(9000.0))
    log.open("long")
    log.add_all(np.arange(9000.0, 30_000.0))
    log.open("short")
    log.add(30_000.0)

    assert log.close("long", 21_000).tolist() == np.arange(8999.0, 30_000.0).tolist()
    assert log.close("short", 1).tolist() == [29_999.0, 30_000.0]
    log.add_all(np.arange(30_001.0, 60_000.0))
    assert len(log) <= 30_000
    log.add(60_000.0)
    log.open("last")
    assert len(log) < 10
    log.add(60_001.0)
    assert log.close("last", 1).tolist() == [60_000.0, 60_001.0]


@pytest.mark.parametrize("num_steps", [3, 100])
def test_steps_that_come_together_are_as_long_as_those_that_come_one_by_one(num_steps: int) -> None:
    ends_s = np.cumsum(np.full(num_steps, 0.1)) + 5.0
    one_by_one, together = StepLog(), StepLog()
    for log in (one_by_one, together):
        log.begin(1.0)
        log.add(1.5)
        log.begin(5.0)
    for end_s in ends_s.tolist():
        one_by_one.add(end_s)
    together.add_all(ends_s)

    assert together.busy_s == one_by_one.busy_s == pytest.approx(0.5 + num_steps * 0.1)
    for log in (one_by_one, together):
        log.open("r")
        log.add(1000.0)
        assert log.close("r", 1).tolist() == [ends_s[-1], 1000.0]


def test_decoded_tokens_of_requests_that_are_not_open_are_named() -> None:
    log = StepLog()
    log.add(1.0)
    log.open("steady")
    decoded = DecodedTokens(["steady", "resumed"], [0, 1], [4, 7], [11, 12])

    (named,) = log.unopened(decoded)

    assert (named.request_id, named.attempt, named.first_position, named.new_token_ids) == ("resumed", 1, 7, [12])
    log.open("resumed")
    assert not log.unopened(decoded)
    assert not log.unopened(None)
