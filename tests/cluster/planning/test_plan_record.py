"""The planner's values, which are kept and sent as JSON."""

from __future__ import annotations

import msgspec

from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator
from cluster.planning.plan_record import PlanInputs, PlanMemory, PlanRecord
from cluster.planning.planner import PlanStep, plan
from tests.cluster.planning.plan_setup import fleet, inputs, windows


def test_inputs_records_and_memory_survive_the_way_as_json() -> None:
    told = inputs(windows([12.0] * 20), fleet(1, 1))
    assert msgspec.json.decode(msgspec.json.encode(told), type=PlanInputs) == told
    step = plan(told, PlanMemory(), ClosedFormEstimator())
    assert msgspec.json.decode(msgspec.json.encode(step), type=PlanStep) == step
    assert msgspec.json.decode(step.record.to_json(), type=PlanRecord) == step.record


def test_engines_that_leave_are_not_part_of_the_current_fleet() -> None:
    first, second, third = fleet(2, 1)
    engines = [
        msgspec.structs.replace(first, is_leaving=True),
        msgspec.structs.replace(second, is_serving=False),
        third,
    ]
    told = inputs(windows([1.0]), engines)
    assert told.current == FleetCounts(1, 1)
    assert told.serving == FleetCounts(0, 1)
