"""The way from one fleet to another, and its price."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.planning.fleet_change import (
    FleetChange,
    PlannedEngine,
    RoleFlip,
    SwitchTimes,
    change_to,
    next_steps,
    switch_cost,
)
from cluster.planning.fleet_counts import FleetCounts, FleetLimits
from cluster.routing.engine_connection import EngineRole
from tests.cluster.planning.plan_setup import fleet, with_role

PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH
COUNTS = st.builds(FleetCounts, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)).filter(lambda f: f.can_serve)


def test_engines_change_roles_before_others_start() -> None:
    assert change_to(FleetCounts(1, 3), fleet(2, 1)) == FleetChange(
        flips=(RoleFlip("prefill-0", DECODE),), starts=FleetCounts(decode=1)
    )


def test_the_engine_with_the_least_to_lose_changes_its_role() -> None:
    first, second = fleet(2)
    engines = [msgspec.structs.replace(first, num_streams=9), second, *fleet(0, 1)]
    assert change_to(FleetCounts(1, 2), engines).flips == (RoleFlip("prefill-1", DECODE),)
    engines = [msgspec.structs.replace(first, num_cached_tokens=9), second, *fleet(0, 1)]
    assert change_to(FleetCounts(1, 2), engines).flips == (RoleFlip("prefill-1", DECODE),)


def test_an_engine_that_does_not_serve_yet_leaves_first_and_changes_no_role() -> None:
    engines = [*fleet(1, 1), PlannedEngine("decode-1", DECODE, is_serving=False)]
    assert change_to(FleetCounts(1, 1), engines) == FleetChange(removals=("decode-1",))
    assert change_to(FleetCounts(2, 1), engines) == FleetChange(removals=("decode-1",), starts=FleetCounts(1))


def test_engines_that_leave_already_and_encode_engines_are_left_out() -> None:
    engines = [
        *fleet(1, 1),
        PlannedEngine("decode-1", DECODE, is_leaving=True),
        PlannedEngine("encode-0", EngineRole.ENCODE),
    ]
    assert change_to(FleetCounts(1, 1), engines).is_empty


def test_under_the_budget_an_engine_starts_once_another_has_gone() -> None:
    limits, target = FleetLimits(max_gpus=3.0, gpus_per_engine=(2.0, 1.0, 1.0)), FleetCounts(0, 1, 2)
    engines = fleet(1, 1)
    first = next_steps(target, engines, limits)
    assert (first.flips, first.removals, first.starts) == ((RoleFlip("prefill-0", BOTH),), (), FleetCounts(both=1))
    small = FleetLimits(max_engines=2)
    leaving = [*fleet(1, 0), PlannedEngine("decode-1", DECODE, is_leaving=True)]
    assert next_steps(FleetCounts(1, 1), leaving, small).starts == FleetCounts()
    assert next_steps(FleetCounts(1, 1), leaving[:1], small).starts == FleetCounts(decode=1)


def test_the_last_engine_that_generates_keeps_its_role_until_another_one_serves() -> None:
    target, limits = FleetCounts(1, 1), FleetLimits()
    [only] = fleet(both=1)
    assert next_steps(target, [only], limits) == FleetChange(starts=FleetCounts(decode=1))
    starting = PlannedEngine("decode-0", DECODE, is_serving=False)
    assert next_steps(target, [only, starting], limits).is_empty
    assert next_steps(target, [only, *fleet(0, 1)], limits).flips == (RoleFlip("both-0", PREFILL),)


def test_the_price_is_drains_lost_tokens_and_starts() -> None:
    engines = fleet(2, 1, num_cached_tokens=1000)
    change = FleetChange((RoleFlip("prefill-0", DECODE),), ("decode-0",), FleetCounts(both=2))
    times = SwitchTimes(start_s=60.0, drain_s=5.0)
    assert switch_cost(change, engines, times, prompt_token_s=1e-3) == 2 * 60 + 2 * 5 + 2 * 1000 * 1e-3
    idle = [msgspec.structs.replace(one, num_streams=0, num_cached_tokens=0) for one in engines]
    assert switch_cost(change, idle, times, prompt_token_s=1e-3) == 120


def test_a_change_says_what_it_does() -> None:
    assert str(change_to(FleetCounts(1, 2, 1), fleet(2, 1))) == "prefill-0 becomes decode, 1 both start"
    assert str(FleetChange(removals=("decode-1",))) == "decode-1 leaves"
    assert str(FleetChange()) == "nothing"


@given(begin=COUNTS, target=COUNTS, spare=st.integers(0, 2))
def test_every_way_ends_at_the_target_within_the_budget_and_serves_throughout(
    begin: FleetCounts, target: FleetCounts, spare: int
) -> None:
    limits = FleetLimits(max_engines=max(begin.num_engines, target.num_engines) + spare)
    engines, num_started = fleet(begin.prefill, begin.decode, begin.both), 0
    for _ in range(12):
        # Those that started serve by now, and those that were leaving are gone.
        engines = [msgspec.structs.replace(one, is_serving=True) for one in engines if not one.is_leaving]
        steps = next_steps(target, engines, limits)
        for flip in steps.flips:
            engines = with_role(flip.engine_id, flip.role, engines)
        engines = [msgspec.structs.replace(one, is_leaving=one.engine_id in steps.removals) for one in engines]
        for role in (PREFILL, DECODE, BOTH):
            for _ in range(steps.starts.of_role(role)):
                num_started += 1
                engines.append(PlannedEngine(f"new-{num_started}", role, is_serving=False))
        assert len(engines) <= limits.max_engines
        assert FleetCounts.of(one.role for one in engines if one.is_serving and not one.is_leaving).can_serve
    assert FleetCounts.of(one.role for one in engines) == target
