"""Predicts how long simulated steps take, by one cost model for each kind of steps, as routers and planners do."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import Floats, StepShape
from cluster.simulation.timing.step_times import ModelStepTimes


@dataclass(frozen=True, slots=True)
class KindStepTimes:
    """The durations that three models predict: of steps that only decode, that only prefill, and that do both.

    decode, prefill, mixed: the coefficients of each kind, in the order of step_shape.FEATURES
    """

    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    mixed: tuple[float, ...]
    _times: tuple[ModelStepTimes, ModelStepTimes, ModelStepTimes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        decode, prefill, mixed = (
            ModelStepTimes(StepCostModel(costs)) for costs in (self.decode, self.prefill, self.mixed)
        )
        object.__setattr__(self, "_times", (decode, prefill, mixed))

    def step_s(self, shape: StepShape) -> float:
        """Return the prediction for a step."""
        decode, prefill, mixed = self._times
        if not shape.num_prefills:
            return decode.step_s(shape)
        return (mixed if shape.num_decodes else prefill).step_s(shape)

    def decode_run_s(self, shape: StepShape, num_steps: int) -> Floats:
        """Return the predictions for a run of decode steps, [num_steps]."""
        return self._times[0].decode_run_s(shape, num_steps)
