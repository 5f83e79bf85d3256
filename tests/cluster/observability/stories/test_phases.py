"""Every phase is a constant by its own name."""

from __future__ import annotations

from cluster.observability.stories import phases
from cluster.observability.stories.request_story import Phase


def test_every_phase_is_a_constant_by_its_own_name() -> None:
    assert {name: value for name, value in vars(phases).items() if isinstance(value, Phase)} == dict(Phase.__members__)
