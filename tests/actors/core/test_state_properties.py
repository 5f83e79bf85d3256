"""Engines with recurrent states keep their invariants, and each state is right, with snapshots that serve prefix hits.

Tests of actors/core/blocks/state_slots.py and actors/core/blocks/state_snapshots.py.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize

from tests.actors.core.arrivals import SETUPS, Setup, keep_states
from tests.actors.core.test_scheduler_properties import SchedulerMachine


class StateMachine(SchedulerMachine):
    """Prompts that begin alike, whose requests have slots. The worker checks the state before it computes anything."""

    @initialize(setup=SETUPS.map(keep_states))
    def start(self, setup: Setup) -> None:
        self.set_up(setup)


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestStates = StateMachine.TestCase
TestStates.settings = settings(_SETTINGS, max_examples=30)


class StateMachineInTestMore(StateMachine):
    """The same, with more examples."""


TestStatesInTestMore = pytest.mark.timeout(600)(pytest.mark.more(StateMachineInTestMore.TestCase))
TestStatesInTestMore.settings = settings(_SETTINGS, max_examples=150)


class StateMachineAtLength(StateMachine):
    """The same, for long."""


TestStatesAtLength = pytest.mark.timeout(7200)(pytest.mark.long(StateMachineAtLength.TestCase))
TestStatesAtLength.settings = settings(_SETTINGS, max_examples=20_000)
