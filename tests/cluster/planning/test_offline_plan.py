"""The plan for a recorded load."""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims
from cluster.planning.offered_load import OfferedRequest
from cluster.planning.offline_plan import OfflinePlan, OfflinePlanSettings, plan_offline
from tests.cluster.planning.plan_setup import SPEED

SETTINGS = OfflinePlanSettings(
    aims=PlanAims(2.0, 0.03, attainment=0.9), limits=FleetLimits(), num_requests=200, num_estimates=24
)


def _trace(rate: float, num: int = 600) -> list[OfferedRequest]:
    draw, arrived_s, found = random.Random(2), 0.0, []
    for _ in range(num):
        arrived_s += draw.expovariate(rate)
        found.append(OfferedRequest(arrived_s, 1000, 0, 100))
    return found


def _plan(settings: OfflinePlanSettings = SETTINGS, rate: float = 20.0, **speed: float) -> OfflinePlan:
    faster = msgspec.structs.replace(SPEED, **speed)
    return plan_offline(_trace(rate), faster, settings, ClosedFormEstimator())


def test_the_recommended_fleet_attains_the_aims_above_the_bound() -> None:
    made = _plan()
    assert made.recommended.service.attainment >= 0.9
    assert made.recommended.fleet.num_engines >= made.least_engines >= made.planned.total_s
    assert made.mean.prefill_s == pytest.approx(20 * 0.1025, rel=0.1)
    assert made.findings == ()


def test_fleets_with_and_without_roles_stand_beside_it() -> None:
    made = _plan()
    assert made.by_roles is not None
    assert made.without_roles is not None
    assert (made.by_roles.fleet.both, made.without_roles.fleet.prefill) == (0, 0)
    assert made.recommended.cost <= min(made.by_roles.cost, made.without_roles.cost)


def test_a_further_engine_carries_a_larger_load() -> None:
    made = _plan()
    assert made.one_more is not None
    assert made.one_more.fleet.num_engines == made.recommended.fleet.num_engines + 1
    assert made.one_more.growth > made.recommended.growth >= 1.0


def test_a_faster_link_helps_where_the_link_is_what_lacks() -> None:
    only_roles = msgspec.structs.replace(SETTINGS, limits=FleetLimits(both=RoleLimits(0, 0)))
    tight = _plan(only_roles, kv_bytes_per_token=100_000, link_bytes_per_s=1.2e9)
    assert tight.faster_link is not None
    assert tight.faster_link.growth > 1.2 * tight.recommended.growth
    wide = _plan(only_roles, kv_bytes_per_token=100_000, link_bytes_per_s=1e12)
    assert wide.faster_link is not None
    assert wide.faster_link.growth == pytest.approx(wide.recommended.growth)


def test_a_budget_that_is_too_small_is_a_finding() -> None:
    made = _plan(msgspec.structs.replace(SETTINGS, limits=FleetLimits(max_gpus=2.0)))
    assert made.recommended.cost <= 2
    assert made.recommended.growth < 1.0
    assert any("no fleet within the budget attains the aims" in finding for finding in made.findings)


def test_a_budget_of_one_engine_has_no_room_for_roles() -> None:
    made = _plan(msgspec.structs.replace(SETTINGS, limits=FleetLimits(max_gpus=1.0)), rate=2.0)
    assert made.recommended.fleet == FleetCounts(both=1)
    assert made.by_roles is None


def test_the_error_of_the_cost_model_widens_the_answer() -> None:
    sure, unsure = _plan(sigma=0.01), _plan(sigma=0.4)
    assert sure.engines_between[1] - sure.engines_between[0] <= 1
    assert unsure.engines_between[0] < sure.engines_between[0]
    assert unsure.engines_between[1] > sure.engines_between[1]


def test_the_error_of_a_guess_widens_the_answer_whatever_the_fit_says() -> None:
    fewest, most = _plan(msgspec.structs.replace(SETTINGS, step_error=2.0), sigma=0.01).engines_between
    assert most >= 3 * fewest, "steps that take four times as long need about four times as many engines"


def test_busy_minutes_count_and_not_the_mean() -> None:
    quiet = _trace(2.0, 600)  # five minutes
    busy = [msgspec.structs.replace(one, arrived_at_s=one.arrived_at_s + 310) for one in _trace(20.0, 4000)]
    made = plan_offline([*quiet, *busy], SPEED, SETTINGS, ClosedFormEstimator())
    assert made.planned.total_s > 1.3 * made.mean.total_s
