"""Draws requests that have nothing in common: a length of the prompt and one of the output for each arrival.

Arrivals are those of cluster.bench.arrivals.arrival_times(), which draws Poisson and gamma processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.simulation.workloads.workload_request import WorkloadRequest
from cluster.traces.trace_request import MAX_TRACE_TOKENS

_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A log-normal distribution of lengths in tokens, rounded, and cut off at both ends.

    mean: of the distribution before it is cut off, at least 1
    cv:   standard deviation / mean; 0: all lengths are the mean. Prompts and outputs of public traces have 0.5 to 2
    low, high: the shortest and the longest length
    """

    mean: float
    cv: float = 0.0
    low: int = 1
    high: int = MAX_TRACE_TOKENS

    def __post_init__(self) -> None:
        if not (self.mean >= 1 and 0 <= self.cv < math.inf and 1 <= self.low <= self.high <= MAX_TRACE_TOKENS):
            raise ValueError(
                f"{self}: mean has to be at least 1, cv finite and at least 0, and 1 <= low <= high <= "
                f"{MAX_TRACE_TOKENS}"
            )

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        """Draw lengths, [num]."""
        variance = math.log1p(self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), num)
        lengths: NDArray[np.int64] = np.clip(np.round(drawn), self.low, self.high).astype(np.int64)
        return lengths


def draw_requests(
    arrivals_s: Iterable[float], prompts: LengthDistribution, outputs: LengthDistribution, seed: int
) -> Iterator[WorkloadRequest]:
    """Yield a request for each arrival; the same seed draws the same lengths.

    arrivals_s: ascending, from the beginning of the workload
    """
    of_prompts, of_outputs = np.random.default_rng(seed).spawn(2)
    arrivals, number = iter(arrivals_s), 0
    while some := list(islice(arrivals, _AT_ONCE)):
        # Always as many are drawn, so that the first requests do not depend on how many come after them.
        num_prompt_tokens = prompts.draw(of_prompts, _AT_ONCE).tolist()
        num_output_tokens = outputs.draw(of_outputs, _AT_ONCE).tolist()
        for arrival_s, num_in, num_out in zip(some, num_prompt_tokens, num_output_tokens, strict=False):
            yield WorkloadRequest(str(number), arrival_s, num_in, num_out)
            number += 1
