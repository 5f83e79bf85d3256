"""The process beside the controller in which the planner decides: estimates take seconds of CPU time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import msgspec

from actors.process.bounded_child import work
from cluster.planning.fleet_estimate import ClosedFormEstimator, FleetEstimator
from cluster.planning.plan_record import PlanInputs, PlanMemory
from cluster.planning.planner import PlanStep, plan


class PlanTask(msgspec.Struct, frozen=True):
    """A tick of the planner."""

    inputs: PlanInputs
    memory: PlanMemory
    seed: int = 0


_DECODER: Final = msgspec.msgpack.Decoder(PlanTask)
_STEP_DECODER: Final = msgspec.msgpack.Decoder(PlanStep)


def main() -> None:
    """Decide until the controller closes the connection."""
    descriptor, memory_bytes = (int(argument) for argument in sys.argv[1:])
    work(descriptor, memory_bytes, _start)


def _start(greeting: bytes) -> Callable[[bytes], bytes]:
    estimator = ClosedFormEstimator()
    return lambda task: answer(task, estimator)


def answer(task: bytes, estimator: FleetEstimator) -> bytes:
    """Decide a tick. task: of encode_task(); returns what decode_step() takes"""
    told = _DECODER.decode(task)
    return msgspec.msgpack.encode(plan(told.inputs, told.memory, estimator, told.seed))


def encode_task(task: PlanTask) -> bytes:
    """Return a tick as the process takes it."""
    return msgspec.msgpack.encode(task)


def decode_step(data: bytes) -> PlanStep:
    """Return the process's answer."""
    return _STEP_DECODER.decode(data)


if __name__ == "__main__":
    main()
