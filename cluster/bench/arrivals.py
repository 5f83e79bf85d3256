"""The requests of a run: when each one arrives, and how long it is. Pure: the same seed gives the same plan."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request before it is sent.

    index:             its number in the run, from 0
    arrival_s:         seconds after the start of the run
    num_input_tokens:  tokens of the prompt, without a shared prefix
    num_output_tokens: tokens that are asked for
    blocks:            ids of the prompt's blocks of 512 tokens in a trace; equal ids are equal tokens
    """

    index: int
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of random requests: uniform between (1 - range_ratio) and (1 + range_ratio) times these.

    This is what `vllm bench serve --random-range-ratio` does.
    """

    num_input_tokens: int
    num_output_tokens: int
    range_ratio: float = 0.0


def arrival_times(num_requests: int, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """Draw the arrival times of requests, in seconds after the start, ascending.

    rate_per_s: requests per second; infinite: all arrive at 0
    burstiness: the shape of the gamma distribution of the gaps. 1 is a Poisson process, below 1 arrivals come in
        bursts, above 1 they are more regular; infinite: all gaps are equal

    As in `vllm bench serve`, the times are scaled so that the last request arrives at num_requests / rate_per_s.
    For burstiness 1 this is a Poisson process, given the number of arrivals in that time.
    """
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    duration_s = num_requests / rate_per_s
    if math.isinf(burstiness):
        return [duration_s * (index + 1) / num_requests for index in range(num_requests)]
    rng = random.Random(f"{seed} arrivals")
    times, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.gammavariate(burstiness, 1.0)
        times.append(now_s)
    # Gamma variates of a tiny shape can all be 0.
    scale = duration_s / now_s if now_s > 0 else 0.0
    return [time_s * scale for time_s in times]


def plan_random(arrivals: Sequence[float], lengths: Lengths, seed: int) -> list[PlannedRequest]:
    """Plan requests of random lengths at these arrival times; every length is at least 1."""
    rng = random.Random(f"{seed} lengths")

    def draw(num_tokens: int) -> int:
        low = math.floor(num_tokens * (1 - lengths.range_ratio))
        return max(1, rng.randint(low, math.ceil(num_tokens * (1 + lengths.range_ratio))))

    return [
        PlannedRequest(index, arrival_s, draw(lengths.num_input_tokens), draw(lengths.num_output_tokens))
        for index, arrival_s in enumerate(arrivals)
    ]


def retimed(plan: Sequence[PlannedRequest], arrivals: Sequence[float]) -> list[PlannedRequest]:
    """Return the plan with other arrival times, as many as it has requests."""
    return [replace(request, arrival_s=arrival_s) for request, arrival_s in zip(plan, arrivals, strict=True)]
