from __future__ import annotations

from pathlib import Path

from actors.costs.cost_file import CostIdentity, load_cost_model
from actors.costs.cost_keeper import CostKeeper
from actors.costs.engine_costs import EngineCosts
from actors.costs.step_cost_model import MIN_SURE_STEPS, CostOrigin
from actors.costs.step_shape import StepShape

IDENTITY = CostIdentity("demo", "cpu", "float32")
DECODE, PREFILL = StepShape(4, 4, 400), StepShape(64, 0, 0, 1, 0, 64 * 32)


def test_the_first_step_of_each_kind_and_size_does_not_count() -> None:
    costs = EngineCosts(wall_clock=lambda: 77.0)
    for shape in (DECODE, PREFILL):
        costs.observe(shape, 60.0)
    assert (costs.model().num_steps, costs.model().updated_at_s) == (0, 0.0)
    for _ in range(20):
        costs.observe(DECODE, 0.01)
    model = costs.model()
    assert (model.num_steps, model.updated_at_s) == (20, 77.0)
    assert 0.0099 < model.seconds(DECODE) < 0.0101


def test_a_model_rests_on_the_warm_up_until_there_are_enough_own_steps() -> None:
    costs = EngineCosts()
    for _ in range(10):
        costs.observe(DECODE, 0.01)
    costs.end_warm_up()
    origins = []
    for _ in range(2):
        for _ in range(MIN_SURE_STEPS - 1):
            costs.observe(DECODE, 0.01)
        origins.append(costs.model().origin)
    assert origins == [CostOrigin.WARM_UP, CostOrigin.OWN_STEPS]


def test_what_is_saved_at_the_end_is_where_the_next_engine_begins(tmp_path: Path) -> None:
    costs = EngineCosts()
    costs.keep(CostKeeper(tmp_path / "new", IDENTITY, "decode-0", "decode"))
    for _ in range(200):
        costs.observe(DECODE, 0.01)
    costs.close()
    saved = load_cost_model(tmp_path / "new" / IDENTITY.file_name("decode"), IDENTITY)
    assert saved.num_steps == 199
    next_costs = EngineCosts(CostKeeper(tmp_path / "new", IDENTITY, "decode-0", "decode").load())
    model = next_costs.model()
    assert (model.origin, model.is_sure, model.num_steps) == (CostOrigin.FILE, True, 199)
    assert model.updated_at_s == saved.updated_at_s
    assert model.residuals == saved.residuals
    for _ in range(MIN_SURE_STEPS + 1):
        next_costs.observe(DECODE, 0.02)
    assert next_costs.model().origin is CostOrigin.OWN_STEPS
    assert next_costs.model().num_steps == 199 + MIN_SURE_STEPS
    assert 0.015 < next_costs.model().seconds(DECODE) < 0.022
