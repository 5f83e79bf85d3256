"""The planner's estimates by simulation: what they see that closed formulas do not."""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims
from cluster.planning.load_bootstrap import DrawnLoad
from cluster.planning.offered_load import OfferedRequest
from cluster.routing.decision import RoutingMode
from cluster.simulation.fleet_estimator import SimulationEstimator
from tests.cluster.planning.plan_setup import SPEED

AIMS = PlanAims(ttft_s=1.0, itl_s=0.05, attainment=0.9)
ESTIMATOR = SimulationEstimator()
HANDOFFS = SimulationEstimator(RoutingMode.DISAGGREGATE)


def drawn(
    num: int, per_s: float, num_prompt_tokens: int = 1000, num_output_tokens: int = 20, num_cached_tokens: int = 0
) -> DrawnLoad:
    """Poisson arrivals of equal requests."""
    draw, now_s, requests = random.Random(5), 0.0, []
    for _ in range(num):
        requests.append(OfferedRequest(now_s, num_prompt_tokens, num_cached_tokens, num_output_tokens))
        now_s += draw.expovariate(per_s)
    return DrawnLoad(tuple(requests), now_s)


def attainment(fleet: FleetCounts, load: DrawnLoad, aims: PlanAims = AIMS) -> float:
    return ESTIMATOR.estimate(fleet, load, SPEED, aims).attainment


def test_more_engines_serve_better_and_equal_arguments_give_equal_estimates() -> None:
    load = drawn(60, 14.0)
    few, many = (ESTIMATOR.estimate(FleetCounts(both=count), load, SPEED, AIMS) for count in (1, 4))
    assert few.attainment < 0.5 < 0.9 < many.attainment
    assert (len(few.met), len(many.met)) == (60, 60)
    assert many.attainment == sum(many.met) / 60
    assert few.ttft_p50_s > many.ttft_p50_s > 0.1
    assert SimulationEstimator().estimate(FleetCounts(both=4), load, SPEED, AIMS) == many


def test_a_fleet_that_falls_behind_is_seen_to_however_short_the_load_is() -> None:
    # In four seconds of a load that is 1.3 times too much, nobody would wait for more than a second yet.
    outputs = drawn(40, 12.0, num_prompt_tokens=100, num_output_tokens=600)
    assert outputs.duration_s < 5.0
    assert attainment(FleetCounts(both=1), outputs) < 0.5
    assert attainment(FleetCounts(both=4), outputs) > 0.9


def test_the_cached_part_of_prompts_is_not_computed() -> None:
    load, cached = drawn(60, 14.0), drawn(60, 14.0, num_cached_tokens=800)
    fleet = FleetCounts(both=1)
    assert attainment(fleet, load) < 0.5
    assert attainment(fleet, cached) > 0.9
    # 512 of the 800 tokens are a block: the prompt is shorter by the others, so that 200 are computed.
    alone = ESTIMATOR.estimate(fleet, drawn(20, 0.5, num_cached_tokens=800), SPEED, AIMS)
    assert alone.ttft_p50_s == pytest.approx(5e-3 + 200 * 1e-4, rel=0.05)


def test_recurrent_states_take_room_from_other_requests() -> None:
    # An engine holds the states of two requests.
    states = msgspec.structs.replace(SPEED, num_state_tokens=90_000)
    load = drawn(40, 12.0, num_prompt_tokens=100, num_output_tokens=600)
    without, with_states = (ESTIMATOR.estimate(FleetCounts(both=4), load, speed, AIMS) for speed in (SPEED, states))
    assert with_states.attainment < 0.5 < 0.9 < without.attainment


def test_a_step_that_mixes_prompts_and_output_delays_the_output() -> None:
    # A prompt keeps its engine busy for 105 ms, so output waits for it where both are computed.
    load, aims = drawn(80, 5.0, num_output_tokens=60), PlanAims(ttft_s=1.0, itl_s=0.009, attainment=0.9)
    mixing, split = FleetCounts(both=2), FleetCounts(prefill=1, decode=1)
    closed = {fleet: ClosedFormEstimator().estimate(fleet, load, SPEED, aims).attainment for fleet in (mixing, split)}
    assert closed[mixing] >= closed[split]
    assert attainment(mixing, load, aims) < aims.attainment
    assert HANDOFFS.estimate(split, load, SPEED, aims).attainment > 0.95


def test_the_link_between_two_roles_counts() -> None:
    slow = msgspec.structs.replace(SPEED, kv_bytes_per_token=100_000, link_bytes_per_s=1e9)
    load, aims = drawn(40, 1.0, num_output_tokens=30), PlanAims(ttft_s=1.0, itl_s=0.007, attainment=0.9)
    split = FleetCounts(prefill=1, decode=1)
    quick, late = (HANDOFFS.estimate(split, load, speed, aims) for speed in (SPEED, slow))
    assert quick.attainment > 0.9
    # All of a prompt is computed in one step, so its 100 MB move while the client waits for the second token.
    assert late.itl_p50_s - quick.itl_p50_s == pytest.approx(0.1 / 29, rel=0.2)
    assert late.attainment == 0.0
    # A state as large as the prompt's KV follows it.
    states = HANDOFFS.estimate(split, load, msgspec.structs.replace(slow, num_state_tokens=1000), aims)
    assert states.itl_p50_s - quick.itl_p50_s == pytest.approx(0.2 / 29, rel=0.2)


@pytest.mark.parametrize("count", [16, 21])
def test_a_slice_of_a_large_fleet_serves_its_part_of_the_load(count: int) -> None:
    enough, too_much = (
        ESTIMATOR.estimate(FleetCounts(both=count), drawn(60, per_s * count), SPEED, AIMS) for per_s in (5.0, 12.0)
    )
    assert enough.attainment > 0.9
    assert too_much.attainment < 0.5


def test_without_load_everybody_is_served_and_without_a_role_nobody() -> None:
    assert attainment(FleetCounts(both=1), DrawnLoad()) == 1.0
    assert attainment(FleetCounts(prefill=2), drawn(10, 1.0)) == 0.0
