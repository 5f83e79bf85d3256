"""Holds the result of a simulation: each request's times, and totals. Values only.

Times are in seconds; times of day count from the beginning of the workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from actors.core.requests.slo import Slo
from cluster.planning.fleet_counts import FleetCounts
from cluster.routing.decision import Decision, Way

NEVER: Final = math.inf
"""The time of what did not happen."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """No ingress or engine took it."""
    FAILED = "failed"
    """It was admitted, and given up after some attempts."""
    UNFINISHED = "unfinished"
    """The simulation ended before it did."""


class SimulatedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, as its client has seen it.

    first_token_s, end_s: NEVER if there was none
    num_output_tokens:    those that came
    num_cached_tokens:    tokens of the prompt whose KV the engine that computed the prompt had, or got from the host's
                          memory or another engine's cache
    itl_p50_s, itl_p99_s, itl_max_s: quantiles of the request's own gaps between tokens; 0 with fewer than two tokens
    way, prefill_engine, decode_engine: of the last attempt; None if there was none, and no prefill engine if one engine
                          has done all
    num_attempts:         how often it was submitted
    num_moves:            how often another engine took it over after a preemption
    ttft_aim_s, itl_aim_s: its own aims, None if it had none
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    outcome: Outcome
    first_token_s: float = NEVER
    end_s: float = NEVER
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0
    itl_max_s: float = 0.0
    way: Way | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    num_attempts: int = 0
    num_moves: int = 0
    ttft_aim_s: float | None = None
    itl_aim_s: float | None = None
    tenant: str = ""

    @property
    def ttft_s(self) -> float:
        """The time from arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """The time from arrival to the end."""
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """The mean gap after the first token; 0 with a single token."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Whether it is complete, and met its own aims, or the given ones where it has none.

        The mean of its gaps is held against the inter-token latency, as in a request's record.
        """
        if self.outcome is not Outcome.COMPLETE:
            return False
        ttft_s = slo.ttft_s if self.ttft_aim_s is None else self.ttft_aim_s
        itl_s = slo.itl_s if self.itl_aim_s is None else self.itl_aim_s
        return (ttft_s is None or self.ttft_s <= ttft_s) and (itl_s is None or self.tpot_s <= itl_s)


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """The work of one engine, over all of its incarnations.

    busy_s:             seconds in steps
    served_s:           seconds in which it was there for requests
    held_s:             seconds in which it took its GPUs: besides, those in which it started
    num_prompt_tokens:  tokens of prompts that it computed
    num_sent_bytes:     bytes of KV that it sent to other engines
    """

    engine_id: str
    busy_s: float
    served_s: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_sent_bytes: int
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """The engines from a time on, up to that of the next point.

    serving:     engines that are there for requests, those that drain included, by role
    num_starting: engines that start, and take GPUs already
    """

    at_s: float
    serving: FleetCounts
    num_starting: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A simulation's result.

    requests:  in the order of arrival
    engines:   in the order of ClusterSpec
    decisions: why routes were chosen, in the order of the choices; empty if they were not kept
    duration_s: from the beginning of the workload to the last event
    fleet:      how many engines there were, from the beginning on; a point for each change
    """

    requests: Sequence[SimulatedRequest]
    engines: Sequence[EngineTotals]
    decisions: Sequence[Decision]
    duration_s: float
    fleet: Sequence[FleetPoint] = ()

    @property
    def engine_seconds(self) -> float:
        """The seconds for which engines took their GPUs, summed."""
        return sum(engine.held_s for engine in self.engines)

    def good_share(self, slo: Slo) -> float:
        """Return the part of the offered requests that met the aims."""
        if not self.requests:
            return 1.0
        return sum(request.meets(slo) for request in self.requests) / len(self.requests)

    def goodput(self, slo: Slo) -> float:
        """Return how many requests that met the aims came in a second, from the first arrival to the last one."""
        if not self.requests:
            return 0.0
        offered_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return sum(request.meets(slo) for request in self.requests) / offered_s if offered_s > 0 else math.inf
