from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.costs.step_shape import StepShape
from cluster.simulation.timing.step_times import ModelStepTimes
from tests.cluster.simulation.simulated_cluster import COSTS

SHAPES = st.builds(
    StepShape,
    num_tokens=st.integers(1, 9000),
    num_decodes=st.integers(0, 300),
    num_decode_context=st.integers(0, 10**6),
    num_prefills=st.integers(0, 4),
    num_prefill_context=st.integers(0, 10**5),
    num_prefill_pairs=st.floats(0, 1e9),
)


@given(SHAPES)
def test_a_step_takes_what_the_cost_model_predicts(shape: StepShape) -> None:
    if not shape.num_prefills:
        shape = StepShape(shape.num_tokens, shape.num_decodes, shape.num_decode_context)
    assert ModelStepTimes(COSTS).step_s(shape) == pytest.approx(COSTS.seconds(shape))
    assert ModelStepTimes(COSTS, slowness=2.0).step_s(shape) == pytest.approx(2 * COSTS.seconds(shape))


@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 50))
def test_a_run_of_decode_steps_has_exactly_the_times_of_its_steps(
    num_decodes: int, num_context: int, num_steps: int
) -> None:
    times = ModelStepTimes(COSTS)
    single = [
        times.step_s(StepShape(num_decodes, num_decodes, num_context + step * num_decodes)) for step in range(num_steps)
    ]

    assert times.decode_run_s(StepShape(num_decodes, num_decodes, num_context), num_steps).tolist() == single
