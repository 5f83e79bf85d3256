"""The planner is told of the engines and their speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.outputs.scheduler_stats import LoadReport, PrefixCacheStats, SchedulerStats
from actors.costs.step_cost_model import Residuals, StepCostModel
from cluster.planning.fleet_change import FleetChange, PlannedEngine
from cluster.planning.fleet_counts import FleetCounts
from cluster.reconciling.engine_slots import EngineState, Slot
from cluster.reconciling.planned_engines import (
    cached_tokens,
    engine_speed,
    missing_engines,
    planned_engine,
    slots_after,
)
from cluster.routing.engine_connection import EngineRole
from kv_transfer.link_load import LinkLoad
from tests.cluster.planning.plan_setup import COSTS

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
SLOT = Slot(PREFILL, 0)
SURE = StepCostModel(
    COSTS, tuple(Residuals(kind, 200, -0.1, 0.0, 0.1, 0.05) for kind in ("decode", "prefill", "mixed"))
)
LOAD = LoadReport(number=1, num_decodes=3, num_blocks=100, block_size=16, max_num_batched_tokens=512, max_num_seqs=32)


def _stats(model: StepCostModel | None = SURE, load: LoadReport | None = LOAD) -> SchedulerStats:
    cache = PrefixCacheStats(queries=1000, hits=250)
    return SchedulerStats(num_blocks=100, block_size=16, prefix_cache_stats=cache, load_report=load, step_costs=model)


@pytest.mark.parametrize(
    ("state", "is_wanted", "is_serving", "is_leaving"),
    [
        (EngineState.READY, True, True, False),
        (EngineState.READY, False, True, True),
        (EngineState.PENDING, True, False, False),
        (EngineState.STARTING, True, False, False),
        (EngineState.DRAINING, True, False, False),
        (EngineState.DRAINING, False, False, True),
        (EngineState.DRAINED, False, False, True),
    ],
)
def test_states_become_serving_and_leaving(
    state: EngineState, *, is_wanted: bool, is_serving: bool, is_leaving: bool
) -> None:
    assert planned_engine(SLOT, DECODE, state, None, is_wanted=is_wanted) == PlannedEngine(
        "prefill-0", DECODE, is_serving=is_serving, is_leaving=is_leaving
    )


def test_a_dead_engine_is_not_told_but_its_wanted_slot_is() -> None:
    assert planned_engine(SLOT, PREFILL, EngineState.DEAD, None, is_wanted=True) is None
    told = missing_engines([SLOT, Slot(DECODE, 0)], [Slot(DECODE, 0)], {SLOT: DECODE})
    assert told == [PlannedEngine("prefill-0", DECODE, is_serving=False)]


def test_streams_and_useful_cached_tokens_come_from_the_counters() -> None:
    engine = planned_engine(SLOT, PREFILL, EngineState.READY, _stats(), is_wanted=True)
    assert engine == PlannedEngine("prefill-0", PREFILL, num_streams=3, num_cached_tokens=400)
    assert cached_tokens(SchedulerStats(num_blocks=100, block_size=16)) == 0, "nothing was ever looked up"


def test_the_speed_is_that_of_the_sure_models_and_the_smallest_limits() -> None:
    small = replace(LOAD, num_blocks=50, max_num_seqs=8)
    linked = replace(LOAD, links=(LinkLoad("d", 0, 2e9, 1e-4),), kv_bytes_per_token=64, num_state_blocks=3)
    speed = engine_speed({"a": _stats(None, small), "b": _stats(SURE, linked)})
    assert speed is not None
    assert (speed.decode, speed.prefill, speed.mixed) == (COSTS, COSTS, COSTS)
    assert (speed.num_kv_tokens, speed.max_num_seqs, speed.max_num_batched_tokens) == (800, 8, 512)
    assert speed.num_state_tokens == 48
    assert (speed.link_bytes_per_s, speed.link_round_trip_s, speed.kv_bytes_per_token) == (2e9, 1e-4, 64)


def test_models_that_are_not_sure_are_corrected_by_their_median_error() -> None:
    decodes = StepCostModel(COSTS, (Residuals("decode", 500, -0.2, 0.6, 2.0, 0.6), Residuals("prefill", 12)))
    prompts = StepCostModel(COSTS, (Residuals("decode", 50), Residuals("prefill", 900, 0.1, 0.5, 1.6, 0.5)))
    assert not decodes.is_sure
    speed = engine_speed({"d": _stats(decodes), "p": _stats(prompts)})
    assert speed is not None
    assert speed.decode == pytest.approx([1.6 * cost for cost in COSTS])
    assert speed.prefill == pytest.approx([1.5 * cost for cost in COSTS])
    assert speed.sigma == pytest.approx(2.2 / 2.563)
    assert engine_speed({"d": _stats(decodes)}) is None, "nobody has prefilled enough"


def test_without_a_sure_model_there_is_no_speed() -> None:
    assert engine_speed({"a": _stats(None)}) is None
    assert engine_speed({"a": _stats(SURE, None)}) is None
    assert engine_speed({}) is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (FleetChange(removals=("decode-0",)), {Slot(PREFILL, 0), Slot(DECODE, 1)}),
        (
            FleetChange(removals=("decode-1",), starts=FleetCounts(prefill=2)),
            {Slot(PREFILL, 0), Slot(PREFILL, 1), Slot(PREFILL, 2), Slot(DECODE, 0)},
        ),
        (FleetChange(), {Slot(PREFILL, 0), Slot(DECODE, 0), Slot(DECODE, 1)}),
    ],
)
def test_the_slots_after_removals_and_starts(steps: FleetChange, expected: set[Slot]) -> None:
    before = [Slot(PREFILL, 0), Slot(DECODE, 0), Slot(DECODE, 1)]
    assert set(slots_after(before, steps)) == expected
