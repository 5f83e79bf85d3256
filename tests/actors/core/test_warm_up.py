from __future__ import annotations

from actors.config import SchedulerConfig
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.warm_up import num_wave_tokens, plan_waves, run_waves
from actors.costs.engine_costs import EngineCosts
from actors.costs.step_cost_model import CostOrigin
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
    run_waves(core, waves, 50, limit_s, clock)
    costs.end_warm_up()
    return costs, core, clock


def test_the_waves_show_every_kind_of_step_and_leave_no_request() -> None:
    costs, core, _ = run(limit_s=60.0, seconds_per_step=0.001)
    model = costs.model()
    assert {one.kind for one in model.residuals if one.num_steps} == {"decode", "prefill", "mixed"}
    assert model.origin is CostOrigin.WARM_UP
    assert not core.scheduler.has_requests()
    core.scheduler.check_integrity()


def test_a_slow_engine_runs_only_the_waves_that_end_in_time() -> None:
    fast, slow = run(60.0, 0.001)[0], run(2.0, 0.1)
    assert 0 < slow[0].model().num_steps < fast.model().num_steps
    assert slow[2].now_s - Clock().now_s <= 2.5


def test_a_cache_and_a_model_that_are_small_get_waves_that_fit() -> None:
    waves = plan_waves(CONFIG, 40, 200)
    assert waves
    assert all(sum(wave) + 6 * len(wave) < 200 and max(wave) <= 34 for wave in waves)
    assert not plan_waves(CONFIG, 6, 200)
    assert not plan_waves(CONFIG, 40, 4)


def test_no_wave_is_shortened_in_a_cache_of_the_largest_size_that_is_asked_for() -> None:
    assert plan_waves(CONFIG, 10**6, num_wave_tokens(CONFIG)) == plan_waves(CONFIG, 10**6, 10**9)
