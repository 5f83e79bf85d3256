"""The estimate by formulas, and aims that are not attainable."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from cluster.planning.engine_work import Work, WorkPrices
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims, attainable_aims
from cluster.planning.load_bootstrap import DrawnLoad, draw_load
from cluster.planning.offered_load import OfferedRequest
from tests.cluster.planning.plan_setup import SPEED

AIMS = PlanAims(ttft_s=1.0, itl_s=0.02, attainment=0.9)
PRICES = WorkPrices.at(SPEED, AIMS.itl_s, 1050.0)
ESTIMATOR = ClosedFormEstimator()


def _load(work: Work) -> DrawnLoad:
    """Return Poisson arrivals of equal requests."""
    draw, arrived_s, sample = random.Random(1), 0.0, []
    for _ in range(400):
        arrived_s += draw.expovariate(1.0)
        sample.append(OfferedRequest(arrived_s, 1000, 0, 100))
    return draw_load(sample, PRICES, work, 400, seed=1)


def test_more_engines_serve_better() -> None:
    load = _load(Work(1.6, 0.4))
    served = [ESTIMATOR.estimate(FleetCounts(n, 1), load, SPEED, AIMS) for n in (2, 3, 4)]
    assert [one.attainment for one in served] == sorted(one.attainment for one in served)
    assert served[0].ttft_p99_s > served[1].ttft_p99_s > served[2].ttft_p99_s
    assert served[2].attainment > 0.99


def test_work_that_comes_faster_than_it_is_done_meets_no_aim() -> None:
    assert ESTIMATOR.estimate(FleetCounts(1, 1), _load(Work(1.6, 0.4)), SPEED, AIMS).attainment == 0.0
    assert ESTIMATOR.estimate(FleetCounts(both=1), _load(Work(0.8, 0.4)), SPEED, AIMS).attainment == 0.0


def test_decodes_that_miss_their_aim_are_missed_aims() -> None:
    load = _load(Work(0.5, 0.5))
    short = ESTIMATOR.estimate(FleetCounts(2, 1), load, SPEED, PlanAims(1.0, 0.0055, 0.9))
    assert (short.attainment, short.itl_p50_s > 0.0055) == (0.0, True)
    assert ESTIMATOR.estimate(FleetCounts(2, 1), load, SPEED, AIMS).attainment > 0.9


def test_the_gap_between_tokens_is_that_of_the_batch_in_balance() -> None:
    load = _load(Work(0.5, 0.5))
    gap_s = ESTIMATOR.estimate(FleetCounts(2, 1), load, SPEED, AIMS).itl_p50_s
    batch = sum(one.num_decode_steps for one in load.requests) / load.duration_s * gap_s
    assert gap_s == pytest.approx(SPEED.decode_step_s(batch, batch * 1050), rel=0.03)


def test_links_that_cannot_carry_the_handoffs_are_missed_aims_for_engines_of_two_roles() -> None:
    load = _load(Work(0.8, 0.4))
    slow = msgspec.structs.replace(SPEED, kv_bytes_per_token=100_000, link_bytes_per_s=1e8)
    assert ESTIMATOR.estimate(FleetCounts(2, 1), load, slow, AIMS).attainment == 0.0
    assert ESTIMATOR.estimate(FleetCounts(both=3), load, slow, AIMS).attainment > 0.9
    fast = msgspec.structs.replace(slow, link_bytes_per_s=1e10)
    assert ESTIMATOR.estimate(FleetCounts(2, 1), load, fast, AIMS).attainment > 0.9


def test_no_load_meets_every_aim_and_a_fleet_without_a_role_meets_none() -> None:
    assert ESTIMATOR.estimate(FleetCounts(1, 1), DrawnLoad(), SPEED, AIMS).attainment == 1.0
    alone = ESTIMATOR.estimate(FleetCounts(prefill=3), _load(Work(0.5, 0.1)), SPEED, AIMS)
    assert (alone.attainment, alone.ttft_p50_s) == (0.0, math.inf)


def test_an_estimate_does_not_depend_on_the_one_before() -> None:
    light, heavy = _load(Work(0.2, 0.1)), _load(Work(1.9, 0.3))
    fresh = ClosedFormEstimator().estimate(FleetCounts(2, 1), heavy, SPEED, AIMS)
    ESTIMATOR.estimate(FleetCounts(2, 1), light, SPEED, AIMS)
    assert ESTIMATOR.estimate(FleetCounts(2, 1), heavy, SPEED, AIMS) == fresh


def test_aims_that_idle_engines_attain_stay_as_they_are() -> None:
    assert attainable_aims([OfferedRequest(0.0, 1000, 0, 100)], SPEED, AIMS) == (AIMS, [])
    assert attainable_aims([], SPEED, AIMS) == (AIMS, [])


def test_an_aim_that_idle_engines_miss_is_a_finding_and_is_replaced() -> None:
    aims, findings = attainable_aims([OfferedRequest(0.0, 1000, 0, 100)], SPEED, PlanAims(0.05, 0.001, 0.9))
    assert aims.ttft_s == pytest.approx(0.21)
    assert aims.itl_s == pytest.approx(2 * SPEED.decode_step_s(1, 1100))
    first, between = findings
    assert first.startswith(
        "the aim of 50 ms for the first token is not attainable: idle engines need 105 ms, and more"
    )
    assert "The plan is for 210 ms" in first
    assert between.startswith("the aim of 1 ms for the time between tokens is not attainable: idle engines need 5 ms")


def test_a_cached_prompt_needs_less() -> None:
    aims, findings = attainable_aims([OfferedRequest(0.0, 1000, 900, 100)], SPEED, PlanAims(0.05, None, 0.9))
    assert (aims.ttft_s, aims.itl_s, findings) == (0.05, None, [])


def test_without_an_aim_a_long_wait_counts_as_a_miss() -> None:
    aims, findings = attainable_aims([OfferedRequest(0.0, 1000, 0, 100)], SPEED, PlanAims(None, None, 0.9))
    assert aims.ttft_s == pytest.approx(1.05)
    assert findings == []
