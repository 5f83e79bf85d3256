from __future__ import annotations

import pytest

from actors.config import SchedulerConfig
from actors.costs.step_shape import StepShape
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.timing.step_times import ModelStepTimes
from tests.cluster.simulation.simulated_cluster import COSTS


@pytest.mark.parametrize("config", [SchedulerConfig(), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)])
def test_routers_get_the_model_that_steps_follow(config: SchedulerConfig) -> None:
    fitted = fit_step_costs(ModelStepTimes(COSTS, slowness=3.0), config)

    assert fitted.is_sure
    assert fitted.num_drifts == 0
    for shape in (StepShape(4, 4, 4000), StepShape(8, num_prefills=1, num_prefill_pairs=32)):
        assert fitted.seconds(shape) == pytest.approx(3 * COSTS.seconds(shape), rel=0.01)


def test_the_largest_steps_are_fitted_whatever_their_size() -> None:
    times = ModelStepTimes(COSTS)
    fitted = fit_step_costs(times, SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=3000))

    for shape in (
        StepShape(32, 32, 32 * 500),
        StepShape(3000, 0, 0, 1, 0, 4_500_000),
        StepShape(520, 8, 8000, 1, 0, 131_072),
    ):
        assert fitted.seconds(shape) == pytest.approx(times.step_s(shape), rel=0.03)
