from __future__ import annotations

import msgspec
import pytest

from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES, StepShape, features_of_shapes

GOOD = Residuals("decode", 100, -0.05, 0.0, 0.05, 0.03)
BAD = Residuals("decode", 100, -0.9, 0.5, 3.0, 0.6)
NONE = Residuals("decode")
COEFFICIENTS = (0.01, 0.001, *[0.0] * (NUM_FEATURES - 2))


def test_seconds_are_coefficients_times_features() -> None:
    model = StepCostModel(COEFFICIENTS)
    shapes = [StepShape(1, 1, 5), StepShape(100, num_prefills=1)]
    assert [model.seconds(shape) for shape in shapes] == pytest.approx([0.011, 0.11])
    assert model.seconds_of(features_of_shapes(shapes)).tolist() == pytest.approx([0.011, 0.11])


@pytest.mark.parametrize(
    ("residuals", "is_sure"),
    [
        ((GOOD, GOOD, GOOD), True),
        ((GOOD, NONE, NONE), True),
        ((GOOD, BAD, GOOD), False),
        ((GOOD, NONE, Residuals("mixed", 31, median_size=10.0)), True),
        ((GOOD, NONE, Residuals("mixed", 32, median_size=10.0)), False),
        ((NONE, NONE, NONE), False),
        ((Residuals("decode", 63), NONE, NONE), False),
    ],
)
def test_a_model_is_sure_of_what_it_has_seen_often_enough(residuals: tuple[Residuals, ...], is_sure: bool) -> None:
    assert StepCostModel(COEFFICIENTS, residuals).is_sure is is_sure


def test_sigma_is_that_of_a_normal_distribution_with_these_quantiles() -> None:
    assert Residuals("decode", 100, -1.2816, 0.0, 1.2816).sigma == pytest.approx(1, abs=1e-3)


def test_a_message_with_negative_or_missing_coefficients_is_refused() -> None:
    good = msgspec.to_builtins(StepCostModel(COEFFICIENTS))
    assert msgspec.convert(good, StepCostModel) == StepCostModel(COEFFICIENTS)
    for coefficients in ((-1.0, *COEFFICIENTS[1:]), COEFFICIENTS[1:], (float("nan"), *COEFFICIENTS[1:])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(good | {"coefficients": coefficients}, StepCostModel)
