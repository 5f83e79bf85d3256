"""The planner's child process gives the decision that the controller would make itself."""

from __future__ import annotations

import sys

import msgspec

from actors.process.bounded_process import BoundedProcess, ProcessLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator
from cluster.planning.plan_record import PlanMemory
from cluster.planning.planner import plan
from cluster.pool.planning.planner_child import PlanTask, answer, decode_step, encode_task
from cluster.routing.decision import RoutingMode
from cluster.simulation.fleet_estimator import SimulationEstimator
from tests.cluster.planning.plan_setup import SETTINGS, fleet, inputs, windows

FEW = msgspec.structs.replace(SETTINGS, num_requests=40, num_estimates=2)
TASK = PlanTask(inputs(windows([12.0] * 20), fleet(1, 1), settings=FEW), PlanMemory(), 3, RoutingMode.AGGREGATE)


def test_an_answer_is_the_planners_decision_with_the_estimator_of_the_clusters_routing() -> None:
    asked: list[RoutingMode] = []

    def estimator_of(mode: RoutingMode) -> ClosedFormEstimator:
        asked.append(mode)
        return ClosedFormEstimator()

    step = decode_step(answer(encode_task(TASK), estimator_of))
    assert step == plan(TASK.inputs, TASK.memory, ClosedFormEstimator(), seed=3)
    assert asked == [RoutingMode.AGGREGATE]


def test_the_process_decides() -> None:
    command = (sys.executable, "-m", "cluster.pool.planning.planner_child")
    process = BoundedProcess(command, (), ProcessLimits(60.0, 2048, 16), "plans the fleet")
    try:
        step = decode_step(process.ask(encode_task(TASK)))
    finally:
        process.close()
    assert step == plan(TASK.inputs, TASK.memory, SimulationEstimator(RoutingMode.AGGREGATE), seed=3)
    assert step.record.estimated_by == "simulation"
