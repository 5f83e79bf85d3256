"""Numbers of engines by role, and their limits."""

from __future__ import annotations

from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits
from cluster.routing.engine_connection import EngineRole


def test_engines_that_encode_images_are_not_counted() -> None:
    roles = [EngineRole.DECODE, EngineRole.ENCODE, EngineRole.PREFILL, EngineRole.DECODE]
    assert FleetCounts.of(roles) == FleetCounts(prefill=1, decode=2)


def test_a_fleet_can_serve_with_both_kinds_of_work_or_with_engines_for_both() -> None:
    assert FleetCounts(1, 1).can_serve
    assert FleetCounts(both=1).can_serve
    assert not FleetCounts(prefill=2).can_serve
    assert not FleetCounts(decode=2).can_serve


def test_limits_hold_for_each_role_and_for_all_gpus() -> None:
    limits = FleetLimits(
        prefill=RoleLimits(least=1, most=2), max_engines=5, max_gpus=8.0, gpus_per_engine=(2.0, 1.0, 0.0)
    )
    assert limits.allows(FleetCounts(2, 3))
    assert not limits.allows(FleetCounts(0, 1, 1)), "too few that prefill"
    assert not limits.allows(FleetCounts(3, 1)), "too many that prefill"
    assert not limits.allows(FleetCounts(2, 4)), "six engines"
    assert limits.cost(FleetCounts(2, 3, 1)) == 8.0, "an engine without GPUs counts as one"


def test_a_fleet_is_named_without_the_roles_that_it_lacks() -> None:
    assert str(FleetCounts(2, 0, 1)) == "2 prefill + 1 both"
    assert str(FleetCounts()) == "no engines"
