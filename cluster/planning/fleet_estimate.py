"""Estimates how well a fleet would serve a load: the interface of the simulator, and a closed form beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Protocol

import msgspec

from cluster.planning.engine_work import EngineSpeed, Work, WorkPrices, mean_context
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.load_bootstrap import DrawnLoad
from cluster.planning.offered_load import OfferedRequest

_MAX_ROUNDS: Final = 40
_NO_AIM_FACTOR: Final = 10.0
_UNATTAINABLE_FACTOR: Final = 2.0
_CLOSE: Final = 0.01
_FULL: Final = 0.95
"""An engine that is busy for this part of the time, or for more, is taken not to keep up: predictions have errors."""


class PlanAims(msgspec.Struct, frozen=True):
    """The aims that the planner holds the service against.

    ttft_s, itl_s: in seconds; None: no aim
    attainment:    the part of the offered requests that has to meet both
    """

    ttft_s: float | None
    itl_s: float | None
    attainment: float


class ServiceEstimate(msgspec.Struct, frozen=True):
    """How well a fleet serves a load.

    attainment: the part of the requests that meet their aims
    met:        whether each request does, in the order of the load; empty if the estimator tells only the part
    ttft_p50_s, ttft_p99_s, itl_p50_s, itl_p99_s: in seconds; of each request the mean of its gaps counts
    """

    attainment: float
    met: tuple[bool, ...] = ()
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0


class FleetEstimator(Protocol):
    """Estimates the service of a fleet; the simulator is one."""

    @property
    def name(self) -> str:
        """The kind of estimate, for the record: simulation or closed_form."""
        ...

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Estimate the service of a fleet of equal engines under a load. Equal arguments give equal estimates."""
        ...


class ClosedFormEstimator:
    """Estimates by formulas: a queue for prompts (Allen and Cunneen's approximation), a batch for decodes.

    It knows nothing of bursts longer than the gaps' variance, of the router, or of memory that is full, so it ranks
    fleets, and a simulation decides between those that it ranks high.
    """

    name = "closed_form"

    def __init__(self) -> None:
        self._facts: _LoadFacts | None = None

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Estimate the service; everybody misses the aims if work comes faster than it is done."""
        if not load.requests:
            return ServiceEstimate(1.0)
        if not fleet.can_serve:
            return ServiceEstimate(0.0, (), math.inf, math.inf, math.inf, math.inf)
        if self._facts is None or self._facts.load is not load or self._facts.speed is not speed:
            self._facts = _LoadFacts.of(load, speed, aims)
        facts = self._facts
        # Engines of both kinds do each kind of work in the time that the other one leaves.
        shared = facts.rate.total_s / fleet.num_engines if fleet.both else 0.0
        prompts = facts.rate.prefill_s / fleet.num_engines if fleet.both else 0.0
        busy = max(facts.rate.prefill_s / (fleet.prefill + fleet.both), shared)
        itl_s = _gap_between_tokens(facts, fleet.decode + fleet.both, prompts)
        wait_s = _mean_wait(facts, busy, fleet.prefill + fleet.both)
        # A fleet with engines for both kinds of work can keep requests where they began.
        links = 0.0 if fleet.both else facts.link_rate / min(fleet.prefill, fleet.decode)
        if itl_s == math.inf or links >= _FULL or (aims.itl_s is not None and itl_s > aims.itl_s):
            met = 0.0
        else:
            met = sum(_part_within(one, wait_s, busy, aims.ttft_s) for one in facts.alone) / len(facts.alone)
        last_s = quantile(facts.alone, 0.99)
        last_s += wait_s / busy * math.log(100 * busy) if 0.01 < busy < _FULL else wait_s
        return ServiceEstimate(met, (), quantile(facts.alone, 0.5) + wait_s, last_s, itl_s, itl_s)


class _LoadFacts(msgspec.Struct, frozen=True):
    """Facts of a load that are the same for every fleet. alone: seconds of each prompt on an idle engine, ascending."""

    load: DrawnLoad
    speed: EngineSpeed
    rate: Work
    alone: tuple[float, ...]
    context: float
    squared_cv: float
    """The squared coefficients of variation of gaps and of prompts, added."""
    link_rate: float = 0.0
    """Seconds of one engine's link that handoffs take, per second."""

    @classmethod
    def of(cls, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> _LoadFacts:
        context = mean_context(load.requests)
        work = WorkPrices.at(speed, aims.itl_s, context).work_of(load.requests)
        alone = sorted(speed.alone_s(load.requests))
        arrivals = [one.arrived_at_s for one in load.requests]
        gaps = [later - one for one, later in pairwise(arrivals)]
        rate = Work(work.prefill_s / load.duration_s, work.decode_s / load.duration_s)
        squared_cv = _squared_cv(gaps) + _squared_cv(alone)
        transfers_s = sum(speed.transfer_s(one.num_prompt_tokens) for one in load.requests)
        return cls(load, speed, rate, tuple(alone), context, squared_cv, transfers_s / load.duration_s)


def attainable_aims(
    requests: Sequence[OfferedRequest], speed: EngineSpeed, aims: PlanAims
) -> tuple[PlanAims, list[str]]:
    """Return the aims to plan for, and in words where they differ from those that are set.

    More engines cannot make a request faster than it is on idle engines. An aim that too few requests would meet even
    there is replaced by one that they meet, since otherwise every fleet would seem too small. Without an aim for the
    first token, a wait of many times the request's own time counts as a miss.
    """
    if not requests:
        return aims, []
    notes, ttft_s, itl_s = [], aims.ttft_s, aims.itl_s
    needed_s = quantile(sorted(speed.alone_s(requests)), aims.attainment)
    if ttft_s is None:
        ttft_s = _NO_AIM_FACTOR * needed_s
    elif needed_s > ttft_s:
        ttft_s = _UNATTAINABLE_FACTOR * needed_s
        notes.append(_unattainable("the first token", aims.ttft_s, needed_s, ttft_s))
    contexts = sorted(speed.decode_step_s(1, one.num_prompt_tokens + one.num_output_tokens) for one in requests)
    needed_s = quantile(contexts, aims.attainment)
    if itl_s is not None and needed_s > itl_s:
        itl_s = _UNATTAINABLE_FACTOR * needed_s
        notes.append(_unattainable("the time between tokens", aims.itl_s, needed_s, itl_s))
    return PlanAims(ttft_s, itl_s, aims.attainment), notes


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of values in ascending order."""
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _unattainable(what: str, aim_s: float | None, needed_s: float, planned_s: float) -> str:
    return (
        f"the aim of {1e3 * (aim_s or 0):.0f} ms for {what} is not attainable: idle engines need "
        f"{1e3 * needed_s:.0f} ms, and more engines do not help. The plan is for {1e3 * planned_s:.0f} ms; raise the "
        "aim, or use faster engines"
    )


def _gap_between_tokens(facts: _LoadFacts, num_decoders: int, prompts: float) -> float:
    """Return the mean gap between tokens; infinite if decodes do not keep up.

    prompts: the part of an engine's time in which it computes prompts, and its decodes wait
    The batch grows until it is fast enough: requests that decode = tokens per second * seconds per token (Little).
    """
    if prompts >= _FULL:
        return math.inf
    load, speed, context = facts.load, facts.speed, facts.context
    tokens_per_s = sum(one.num_decode_steps for one in load.requests) / load.duration_s / num_decoders
    largest, batch, gap_s = speed.largest_batch(context), 1.0, 0.0
    for _ in range(_MAX_ROUNDS):
        gap_s = speed.decode_step_s(batch, batch * context) / (1 - prompts)
        batch, before = max(tokens_per_s * gap_s, 1.0), batch
        if batch > largest:
            return math.inf
        if abs(batch - before) < _CLOSE * before:
            break
    return gap_s


def _mean_wait(facts: _LoadFacts, busy: float, num_servers: int) -> float:
    """Return the mean wait of a prompt before its computation (Allen and Cunneen)."""
    if busy >= _FULL:
        return math.inf
    crowd = math.pow(busy, math.sqrt(2 * (num_servers + 1)) - 1) / (num_servers * (1 - busy))
    mean_s = facts.rate.prefill_s * facts.load.duration_s / len(facts.alone)
    return crowd * facts.squared_cv / 2 * mean_s


def _squared_cv(values: Sequence[float]) -> float:
    """Return the squared coefficient of variation; 1 of values that are too few or all 0."""
    mean = sum(values) / len(values) if values else 0.0
    return sum((one - mean) ** 2 for one in values) / len(values) / mean**2 if mean > 0 else 1.0


def _part_within(own_s: float, wait_s: float, busy: float, aim_s: float | None) -> float:
    """Return the probability that a prompt's wait leaves enough of the aim; the wait's tail is exponential."""
    if wait_s == math.inf:
        return 0.0
    if aim_s is None:
        return 1.0
    left_s = aim_s - own_s
    if left_s < 0:
        return 0.0
    return 1.0 if wait_s <= 0 else 1 - busy * math.exp(-left_s * busy / wait_s)
