"""The planner's child process gives the decision that the controller would make itself."""

from __future__ import annotations

import sys

from actors.process.bounded_process import BoundedProcess, ProcessLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator
from cluster.planning.plan_record import PlanMemory
from cluster.planning.planner import plan
from cluster.pool.planning.planner_child import PlanTask, answer, decode_step, encode_task
from tests.cluster.planning.plan_setup import fleet, inputs, windows

TASK = PlanTask(inputs(windows([12.0] * 20), fleet(1, 1)), PlanMemory(), seed=3)


def test_an_answer_is_the_planners_decision() -> None:
    step = decode_step(answer(encode_task(TASK), ClosedFormEstimator()))
    assert step == plan(TASK.inputs, TASK.memory, ClosedFormEstimator(), seed=3)


def test_the_process_decides() -> None:
    command = (sys.executable, "-m", "cluster.pool.planning.planner_child")
    process = BoundedProcess(command, (), ProcessLimits(60.0, 2048, 16), "plans the fleet")
    try:
        step = decode_step(process.ask(encode_task(TASK)))
    finally:
        process.close()
    assert step == plan(TASK.inputs, TASK.memory, ClosedFormEstimator(), seed=3)
