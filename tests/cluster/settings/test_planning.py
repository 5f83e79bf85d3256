"""The planner's settings, and what becomes of them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.access.aims import Aims
from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import PlanAims
from cluster.planning.plan_record import PlannerMode
from cluster.settings.planning import PlannerConfig, RoleRange


def test_there_is_no_planner_by_default() -> None:
    assert PlannerConfig().mode is PlannerMode.NONE


def test_a_range_has_its_ends_in_order() -> None:
    with pytest.raises(ValidationError, match=r"min \(3\) must be at most max \(2\)"):
        RoleRange(min=3, max=2)


def test_limits_and_aims_reach_the_planner() -> None:
    config = PlannerConfig(
        attainment=0.95, max_engines=8, max_gpus=16.0, prefill=RoleRange(min=1, max=4), decode=RoleRange(min=2)
    )
    settings = config.plan_settings(Aims(ttft_ms=500.0), (2.0, 2.0, 4.0))
    assert settings.aims == PlanAims(0.5, None, attainment=0.95)
    assert settings.limits == FleetLimits(
        RoleLimits(1, 4), RoleLimits(2, 1024), RoleLimits(0, 1024), 8, 16.0, (2.0, 2.0, 4.0)
    )
    assert settings.limits.allows(FleetCounts(2, 4))
    assert not settings.limits.allows(FleetCounts(1, 2, 3)), "18 GPUs"


def test_without_limits_the_ranges_of_the_roles_hold() -> None:
    settings = PlannerConfig().plan_settings(Aims(), (1.0, 1.0, 1.0))
    assert settings.aims == PlanAims(None, None, attainment=0.9)
    assert settings.limits.max_engines == 3072
