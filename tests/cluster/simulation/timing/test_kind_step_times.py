"""Steps of each kind take what the model of that kind says."""

from __future__ import annotations

from actors.costs.step_shape import NUM_FEATURES, StepShape
from cluster.simulation.timing.kind_step_times import KindStepTimes

REST = (0.0,) * (NUM_FEATURES - 1)
TIMES = KindStepTimes((1.0, *REST), (2.0, *REST), (3.0, *REST))


def test_each_kind_of_steps_has_its_own_model() -> None:
    assert TIMES.step_s(StepShape(4, 4, 100)) == 1.0
    assert TIMES.step_s(StepShape(64, 0, 0, 1, 0, 2048)) == 2.0
    assert TIMES.step_s(StepShape(68, 4, 100, 1, 0, 2048)) == 3.0


def test_a_run_of_decode_steps_takes_what_single_steps_take() -> None:
    assert TIMES.decode_run_s(StepShape(4, 4, 100), 3).tolist() == [1.0, 1.0, 1.0]
