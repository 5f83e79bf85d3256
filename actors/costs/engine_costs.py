"""The cost model of one engine's steps: what it starts from, and the steps of the engine that change it.

An engine starts from the file that it, or another engine with the same identity, has saved. Without a file it runs a
few steps without requests first (actors/core/warm_up.py). After MIN_SURE_STEPS steps with requests the model counts as
the engine's own (CostOrigin.OWN_STEPS).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from actors.costs.cost_keeper import CostKeeper
from actors.costs.step_cost_fit import StepCostFit, bucket_key
from actors.costs.step_cost_model import MIN_SURE_STEPS, CostOrigin, StepCostModel
from actors.costs.step_shape import StepShape


class EngineCosts:
    """Takes the steps of an engine, and gives the newest model. One thread uses it; a keeper's thread reads."""

    def __init__(self, prior: StepCostModel | None = None, wall_clock: Callable[[], float] = time.time) -> None:
        """prior: a model that was fitted earlier or elsewhere; wall_clock: Unix time in seconds."""
        self._fit = StepCostFit(prior)
        self._wall_clock = wall_clock
        self._origin = CostOrigin.OWN_STEPS if prior is None else prior.origin
        self._updated_at_s = 0.0 if prior is None else prior.updated_at_s
        self._known: set[tuple[int, int]] = set()
        self._num_warm_up_steps = 0
        self._lasting: StepCostModel | None = None
        self._keeper: CostKeeper | None = None

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take in a step, unless it is the first of its kind and size: such a step may compile, or capture a graph."""
        key = bucket_key(shape)
        if key not in self._known:
            self._known.add(key)
            return
        self._fit.observe(shape, seconds)
        self._updated_at_s = self._wall_clock()

    def end_warm_up(self) -> None:
        """Note that the steps so far had no requests."""
        if self._fit.num_own_steps and self._origin is CostOrigin.OWN_STEPS:
            self._origin = CostOrigin.WARM_UP
        self._fit.end_warm_up()
        self._num_warm_up_steps = self._fit.num_own_steps

    def model(self) -> StepCostModel:
        """Return the model that fits all steps so far."""
        is_own = self._fit.num_own_steps - self._num_warm_up_steps >= MIN_SURE_STEPS
        origin = CostOrigin.OWN_STEPS if is_own else self._origin
        if self._keeper is not None:
            self._lasting = replace(self._fit.lasting_model(), origin=origin, updated_at_s=self._updated_at_s)
        return replace(self._fit.model(), origin=origin, updated_at_s=self._updated_at_s)

    def keep(self, keeper: CostKeeper) -> None:
        """Let the keeper save what lasts of every model that model() returns, until close()."""
        self._keeper = keeper
        keeper.start(lambda: self._lasting)

    def close(self) -> None:
        """Save the newest model."""
        if self._keeper is not None:
            self.model()
            self._keeper.stop()
