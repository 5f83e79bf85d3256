"""The fitted model of how long an engine's steps take. It is a value: routing, status and files share it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from actors.costs.step_shape import FEATURES, NUM_FEATURES, Floats, StepShape, features_of_shapes

KINDS: Final = ("decode", "prefill", "mixed")
"""Kinds of steps: only decodes, only chunks of prompts, both."""
_UnixTime = Annotated[float, Meta(ge=0.0, le=1e12)]
_Kind = Annotated[str, Meta(max_length=16)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
_Error = Annotated[float, Meta(ge=-1.0, le=1e6)]
MIN_STEPS_OF_KIND: Final = 32
"""An engine knows a kind of steps once it has run this many of them. Errors before that are those of guesses."""
MIN_SURE_STEPS: Final = 64
MAX_SURE_ERROR: Final = 0.3
"""A model is sure once it has seen this many steps, and its median error in the kinds it knows is at most this."""
MAX_KEPT_ERROR: Final = 1.0
"""Decisions that rest on what a model says of a kind go on to do so up to this error: noise of a moment is no reason to
stop."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The errors of predictions that were made before their steps, for one kind of steps: measured / predicted - 1.

    kind:      decode, prefill or mixed
    num_steps: steps of this kind that the model has seen; the quantiles are those of the newest of them
    """

    kind: _Kind
    num_steps: Annotated[int, Meta(ge=0, le=2**62)] = 0
    low: _Error = 0.0
    """The 10 % quantile."""
    median: _Error = 0.0
    high: _Error = 0.0
    """The 90 % quantile."""
    median_size: _Error = 0.0
    """The median of the errors' absolute values."""

    @property
    def sigma(self) -> float:
        """The standard deviation of a normal distribution with these quantiles."""
        return (self.high - self.low) / 2.563


class CostOrigin(Enum):
    """The steps that a model's coefficients rest on."""

    FILE = "file"
    """A file that the same engine has saved in an earlier run."""
    SIBLING = "sibling"
    """A file that another engine has saved, with the same model on the same device."""
    WARM_UP = "warm-up"
    """The steps that the engine has run at its start, without requests."""
    OWN_STEPS = "own steps"
    """Enough steps with requests."""


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """Predicts the seconds of a step: the sum of coefficients times features (step_shape.FEATURES).

    coefficients: seconds per unit of each feature, not negative
    residuals:    a kind of steps each, in the order of KINDS
    num_drifts:   how often the model noticed that steps had become slower or faster than it predicts
    updated_at_s: Unix time of the newest step that the model has seen; 0: it has seen none
    """

    coefficients: Annotated[tuple[_Seconds, ...], Meta(min_length=NUM_FEATURES, max_length=NUM_FEATURES)]
    residuals: Annotated[tuple[Residuals, ...], Meta(max_length=len(KINDS))] = ()
    num_drifts: Annotated[int, Meta(ge=0, le=2**62)] = 0
    origin: CostOrigin = CostOrigin.OWN_STEPS
    updated_at_s: _UnixTime = 0.0

    @property
    def num_steps(self) -> int:
        """How many steps the model was fitted to."""
        return sum(residuals.num_steps for residuals in self.residuals)

    @property
    def seconds_by_feature(self) -> dict[str, float]:
        """The coefficients by the names of their features."""
        return dict(zip(FEATURES, self.coefficients, strict=False))

    def knows(self, kind: str) -> bool:
        """Whether the model has seen enough steps of a kind to tell how long these take."""
        return any(one.kind == kind and one.num_steps >= MIN_STEPS_OF_KIND for one in self.residuals)

    @property
    def is_sure(self) -> bool:
        """Whether decisions may rest on the model: it has seen enough steps, and predicts the kinds that it knows."""
        known = [residuals for residuals in self.residuals if residuals.num_steps >= MIN_STEPS_OF_KIND]
        return self.num_steps >= MIN_SURE_STEPS and all(one.median_size <= MAX_SURE_ERROR for one in known)

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted duration of a step."""
        return float(features_of_shapes([shape])[0] @ np.asarray(self.coefficients))

    def seconds_of(self, features: Floats) -> Floats:
        """Return the predicted durations of n steps. features: [n, NUM_FEATURES]"""
        predicted: Floats = features @ np.asarray(self.coefficients)
        return predicted
