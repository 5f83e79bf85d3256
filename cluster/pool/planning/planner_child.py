"""The process beside the controller in which the planner decides: estimates take seconds of CPU time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Final

import msgspec

from actors.process.bounded_child import work
from cluster.planning.fleet_estimate import FleetEstimator
from cluster.planning.plan_record import PlanInputs, PlanMemory
from cluster.planning.planner import PlanStep, plan
from cluster.routing.decision import RoutingMode


class PlanTask(msgspec.Struct, frozen=True):
    """A tick of the planner. routing_mode: how the cluster chooses routes"""

    inputs: PlanInputs
    memory: PlanMemory
    seed: int = 0
    routing_mode: RoutingMode = RoutingMode.COST


_DECODER: Final = msgspec.msgpack.Decoder(PlanTask)
_STEP_DECODER: Final = msgspec.msgpack.Decoder(PlanStep)


def main() -> None:
    """Decide until the controller closes the connection."""
    descriptor, memory_bytes = (int(argument) for argument in sys.argv[1:])
    work(descriptor, memory_bytes, _start)


def _start(greeting: bytes) -> Callable[[bytes], bytes]:
    # Imported here: the controller imports this module too, and never simulates.
    from cluster.simulation.fleet_estimator import SimulationEstimator

    # An estimator keeps what it has learned of the engines' speed for the next tick.
    estimator_of = cache(SimulationEstimator)
    return lambda task: answer(task, estimator_of)


def answer(task: bytes, estimator_of: Callable[[RoutingMode], FleetEstimator]) -> bytes:
    """Decide a tick.

    task:         of encode_task()
    estimator_of: returns the estimator for clusters that route in this mode
    Returns what decode_step() takes.
    """
    told = _DECODER.decode(task)
    return msgspec.msgpack.encode(plan(told.inputs, told.memory, estimator_of(told.routing_mode), told.seed))


def encode_task(task: PlanTask) -> bytes:
    """Return a tick as the process takes it."""
    return msgspec.msgpack.encode(task)


def decode_step(data: bytes) -> PlanStep:
    """Return the process's answer."""
    return _STEP_DECODER.decode(data)


if __name__ == "__main__":
    main()
