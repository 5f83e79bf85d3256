from __future__ import annotations

from types import SimpleNamespace

import pytest

from actors.config import SchedulerConfig
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.warm_up import num_wave_tokens, plan_waves, run_waves
from actors.costs.engine_costs import EngineCosts
from actors.costs.step_cost_model import CostOrigin
from actors.costs.step_shape import StepShape
from actors.engine_core import EngineCore
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_scheduler
from tests.actors.core.fakes import FakeWorker
from tests.actors.test_engine_core import FakeExecutor

CONFIG = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128)


def run(limit_s: float, seconds_per_step: float) -> tuple[EngineCosts, EngineCore, Clock]:
    clock, executor, costs = Clock(), FakeExecutor(FakeWorker(400, BLOCK_SIZE)), EngineCosts()
    scheduler = make_scheduler(max_num_seqs=32, max_num_batched_tokens=128, num_blocks=400, max_model_len=1000)
    core = EngineCore(scheduler, executor, clock, hash_key=PUBLIC_KEY, costs=costs)

    def pass_time() -> None:
        clock.now_s += seconds_per_step

    executor.while_it_runs = pass_time
    waves = plan_waves(CONFIG, 1000, 400 * scheduler.block_size)
    run_waves(core, waves, 50, limit_s, clock, max_step_tokens=128)
    costs.end_warm_up()
    return costs, core, clock


def test_the_waves_show_every_kind_of_step_and_leave_no_request() -> None:
    costs, core, _ = run(limit_s=60.0, seconds_per_step=0.001)
    model = costs.model()
    assert {one.kind for one in model.residuals if one.num_steps} == {"decode", "prefill", "mixed"}
    assert model.origin is CostOrigin.WARM_UP
    assert not core.scheduler.has_requests()
    core.scheduler.check_integrity()


def test_a_full_chunk_and_a_small_one_come_after_others() -> None:
    shapes: list[StepShape] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCosts, "observe", lambda self, shape, seconds: shapes.append(shape))
        run(limit_s=60.0, seconds_per_step=0.001)
    alone = [shape for shape in shapes if shape.num_prefills == 1 and not shape.num_decodes]
    assert StepShape(128, 0, 0, 1, 128, 128 * (128 + 64)) in alone
    assert StepShape(16, 0, 0, 1, 256, 16 * (256 + 8)) in alone


@pytest.mark.parametrize("limit_s", [0.25, 1.0, 2.0])
def test_the_time_is_kept_but_for_one_step_and_no_request_is_left(limit_s: float) -> None:
    num_steps = run(60.0, 0.001)[0].model().num_steps
    costs, core, clock = run(limit_s, 0.1)
    assert 0 < costs.model().num_steps < num_steps
    assert clock.now_s - Clock().now_s <= limit_s + 3 * 0.1 + 1e-6, "a step, and two empty ones that end the requests"
    assert not core.scheduler.has_requests()
    core.scheduler.check_integrity()


def test_without_time_no_step_is_run() -> None:
    costs, _, clock = run(0.0, 0.1)
    assert costs.model().num_steps == 0
    assert clock.now_s == Clock().now_s


def test_a_wave_whose_first_step_would_take_too_long_is_left_out_and_smaller_ones_are_not() -> None:
    began: list[int] = []

    class Engine:
        now_s, tokens = 0.0, 0

        def submit(self, request: EngineCoreRequest) -> None:
            self.tokens += len(request.prompt_token_ids)

        def abort(self, request_id: str) -> None:
            raise AssertionError("nothing is cut off")

        def step(self) -> SimpleNamespace:
            began.append(self.tokens)
            self.now_s += 0.01 * self.tokens
            self.tokens = 0
            return SimpleNamespace(is_idle=True)

    engine = Engine()
    run_waves(engine, [[10], [40], [90], [30]], 50, 1.0, lambda: engine.now_s, max_step_tokens=60)
    assert began == [10, 40, 30], "90 tokens are computed in steps of 60, of which one would take 0.6 s"


def test_a_cache_and_a_model_that_are_small_get_waves_that_fit() -> None:
    waves = plan_waves(CONFIG, 40, 200)
    assert waves
    assert all(sum(wave) + 6 * len(wave) < 200 and max(wave) <= 34 for wave in waves)
    assert not plan_waves(CONFIG, 6, 200)
    assert not plan_waves(CONFIG, 40, 4)


def test_no_wave_is_shortened_in_a_cache_of_the_largest_size_that_is_asked_for() -> None:
    assert plan_waves(CONFIG, 10**6, num_wave_tokens(CONFIG)) == plan_waves(CONFIG, 10**6, 10**9)
