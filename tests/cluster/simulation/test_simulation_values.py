"""The values that a simulation takes and returns mean what they say.

Tests of cluster/simulation/cluster_spec.py, cluster/simulation/faults/fault.py,
cluster/simulation/simulation_result.py and cluster/simulation/timing/step_times.py.
"""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import FEATURES, StepShape
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.cluster_spec import EngineSpec
from cluster.simulation.faults.fault import KillEngine
from cluster.simulation.simulation_result import Outcome, SimulatedRequest, SimulationResult
from cluster.simulation.timing.step_times import ModelStepTimes
from cluster.simulation.workloads.workload_request import HASHED_TOKENS

SLO = Slo(ttft_s=1.0, itl_s=0.1)
TIMES = ModelStepTimes(StepCostModel(tuple(0.001 * (index + 1) for index in range(len(FEATURES)))))
GOOD = SimulatedRequest(
    "r", 10.0, 100, Outcome.COMPLETE, first_token_s=11.0, end_s=12.0, num_output_tokens=11, itl_p99_s=0.5
)


def changed(**fields: object) -> SimulatedRequest:
    known = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    return SimulatedRequest(**(known | fields))


def test_a_request_that_is_as_late_as_its_aims_allow_meets_them() -> None:
    assert (GOOD.ttft_s, GOOD.e2e_s, GOOD.tpot_s) == (1.0, 2.0, 0.1)
    assert GOOD.meets(SLO)
    assert not changed(first_token_s=11.01).meets(SLO)
    assert not changed(end_s=12.1).meets(SLO)
    assert changed(first_token_s=99.0, ttft_aim_s=100.0).meets(SLO), "its own aim"
    assert not any(changed(outcome=outcome).meets(Slo()) for outcome in Outcome if outcome is not Outcome.COMPLETE)


def test_goodput_counts_good_requests_by_the_time_in_which_requests_were_offered() -> None:
    requests = [
        changed(arrival_s=0.0, first_token_s=0.5, end_s=1.5),
        changed(outcome=Outcome.REFUSED),
        changed(arrival_s=10.5),
    ]
    result = SimulationResult(requests, [], [], 99.0)
    assert (result.good_share(SLO), result.goodput(SLO)) == (2 / 3, 2 / 10.5)
    assert SimulationResult([], [], [], 0.0).goodput(SLO) == 0.0
    assert SimulationResult([GOOD], [], [], 0.0).goodput(SLO) == math.inf


def test_a_run_of_decode_steps_takes_exactly_as_long_as_its_steps_one_by_one() -> None:
    single = [TIMES.step_s(StepShape(7, 7, 1000 + 7 * step)) for step in range(20)]
    assert TIMES.decode_run_s(StepShape(7, 7, 1000), 20).tolist() == single
    assert single == sorted(set(single)), "contexts grow"


def test_blocks_of_engines_are_those_that_workloads_have_hashes_for() -> None:
    spec = EngineSpec("prefill-0", EngineRole.PREFILL, TIMES, 100, SchedulerConfig())
    assert spec.block_size == HASHED_TOKENS


def test_a_fault_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        KillEngine(1.0, "prefill-0").at_s = 2.0  # type: ignore[misc]  # the point
