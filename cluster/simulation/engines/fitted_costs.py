"""The cost model that a simulated engine reports to routers: what a real engine would have fitted to such steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from actors.config import SchedulerConfig
from actors.costs.step_cost_fit import StepCostFit
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import StepShape
from cluster.simulation.timing.step_times import StepTimes

_CONTEXTS: Final = (64, 1024, 8192)
_NUM_ROUNDS: Final = 24
"""How often each shape comes: a model is sure after 64 steps, and there may be as few as three shapes of a kind."""


def fit_step_costs(step_times: StepTimes, config: SchedulerConfig) -> StepCostModel:
    """Fit a cost model to steps of all the sizes that an engine with this configuration takes.

    step_times: hashable; the fit to steps that were fitted lately is not made again
    """
    return _fit(step_times, config.max_num_seqs, config.max_num_batched_tokens)


@lru_cache(maxsize=16)
def _fit(step_times: StepTimes, max_num_seqs: int, max_num_batched_tokens: int) -> StepCostModel:
    fit, draw = StepCostFit(), random.Random(0)
    for _ in range(_NUM_ROUNDS):
        shapes = list(_shapes(max_num_seqs, max_num_batched_tokens))
        draw.shuffle(shapes)
        for shape in shapes:
            fit.observe(shape, step_times.step_s(shape))
    return fit.model()


def _shapes(max_num_seqs: int, most: int) -> Iterator[StepShape]:
    batches = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size <= max_num_seqs]
    chunks = [*(size for size in (16, 64, 256, 512, 1024, 2048, 4096, 8192) if size < most), most]
    for context in _CONTEXTS:
        for batch in batches:
            yield StepShape(batch, batch, batch * context)
        for chunk in chunks:
            pairs = chunk * (context + chunk / 2)
            yield StepShape(chunk, 0, 0, 1, context, pairs)
            yield StepShape(chunk, 0, 0, 1, 0, chunk * chunk / 2)
            for batch in batches[::2]:
                yield StepShape(chunk + batch, batch, batch * context, 1, context, pairs)
