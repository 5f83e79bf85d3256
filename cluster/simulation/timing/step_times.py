"""Defines what says how long a simulated step takes, and takes it from a fitted cost model."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul
from typing import Protocol

import numpy as np

from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import HINGES, Floats, StepShape


class StepTimes(Protocol):
    """The durations of an engine's steps. Every method is a function of its arguments: equal steps take equal times."""

    def __hash__(self) -> int:
        """Return a hash, as what follows from equal durations is computed once."""
        ...

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds that a step takes, more than 0."""
        ...

    def decode_run_s(self, shape: StepShape, num_steps: int) -> Floats:
        """Return the seconds of each of num_steps decode steps, [num_steps].

        shape: the first step, which only decodes; each further step has num_decodes more tokens of context than the one
               before it. Entry i is exactly step_s() of that step: a simulation that takes steps one at a time and one
               that takes many at once give the same times to the last bit.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelStepTimes:
    """The durations that a cost model predicts. slowness: a factor on all of them"""

    model: StepCostModel
    slowness: float = 1.0
    _costs: dict[str, float] = field(init=False, repr=False, compare=False)
    _hinges: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        costs = {name: self.slowness * cost for name, cost in self.model.seconds_by_feature.items()}
        object.__setattr__(self, "_costs", costs)
        object.__setattr__(self, "_hinges", tuple(costs[f"token_above_{hinge}"] for hinge in HINGES))

    def step_s(self, shape: StepShape) -> float:
        """Return the prediction for a step."""
        fixed_s, context_s = self._parts(shape)
        return fixed_s + context_s * shape.num_decode_context

    def decode_run_s(self, shape: StepShape, num_steps: int) -> Floats:
        """Return the predictions for a run of decode steps, [num_steps]."""
        fixed_s, context_s = self._parts(shape)
        contexts: Floats = shape.num_decode_context + shape.num_decodes * np.arange(num_steps, dtype=np.float64)
        return fixed_s + context_s * contexts

    def _parts(self, shape: StepShape) -> tuple[float, float]:
        """Return the seconds that do not depend on the decodes' context, and those of a token of it."""
        costs, num_tokens = self._costs, shape.num_tokens
        above = [max(num_tokens - hinge, 0) for hinge in HINGES]
        fixed_s = costs["step"] + costs["token"] * num_tokens + sum(map(mul, self._hinges, above))
        fixed_s += costs["decode"] * shape.num_decodes
        if shape.num_prefills:
            fixed_s += costs["prefill"] + costs["prefill_context_token"] * shape.num_prefill_context
            fixed_s += costs["prefill_pair"] * shape.num_prefill_pairs
        return fixed_s, costs["decode_context_token"]
