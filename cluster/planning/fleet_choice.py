"""Chooses the fleet for a load: the cheapest one whose service meets the aims, with the price of the way to it.

Many fleets are ranked by the closed form; few, around the best of these, are estimated by the simulator. All of them
are compared on the same arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cluster.planning.candidate_fleets import candidates, clamped, neighbours
from cluster.planning.engine_work import EngineSpeed, Work
from cluster.planning.fleet_change import change_to, switch_cost
from cluster.planning.fleet_counts import FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, FleetEstimator, ServiceEstimate, attainable_aims
from cluster.planning.load_bootstrap import DrawnLoad
from cluster.planning.plan_record import CandidateRecord, PlanInputs

_LONGEST_S: Final = 1e6
"""JSON has no infinity."""
_NUM_ROUNDS: Final = 4
_NUM_NEAR: Final = 2
"""How many neighbours of each cost are estimated."""
_NEARLY: Final = 0.01
"""The largest difference in attainment with which two fleets count as serving equally well."""


class FleetChoice:
    """The estimates of one tick: each fleet is estimated once."""

    def __init__(
        self, inputs: PlanInputs, speed: EngineSpeed, work: Work, load: DrawnLoad, estimator: FleetEstimator
    ) -> None:
        """Estimate nothing yet.

        work: the work that is planned for, in engine-seconds per second; load: requests that bring it
        aims: those that are set, as far as they are attainable; findings: where they are not, in words
        """
        self._inputs = inputs
        self._speed = speed
        self._work = work
        self._load = load
        self._estimator = estimator
        self._screen = ClosedFormEstimator()
        self._estimates: dict[FleetCounts, ServiceEstimate] = {}
        self.aims, self.findings = attainable_aims(load.requests, speed, inputs.settings.aims)

    def estimate(self, fleet: FleetCounts) -> ServiceEstimate:
        """Return how well a fleet would serve the load."""
        if fleet not in self._estimates:
            self._estimates[fleet] = self._estimator.estimate(fleet, self._load, self._speed, self.aims)
        return self._estimates[fleet]

    def attains(self, fleet: FleetCounts) -> bool:
        """Whether a fleet meets the aims for enough of the requests."""
        return self.estimate(fleet).attainment >= self.aims.attainment

    def cost_s(self, fleet: FleetCounts) -> float:
        """Return what a fleet costs over the horizon, the way to it included, in engine-seconds."""
        settings = self._inputs.settings
        return settings.limits.cost(fleet) * settings.horizon_s + self.switch_cost_s(fleet)

    def switch_cost_s(self, fleet: FleetCounts) -> float:
        """Return what the way to a fleet costs, in engine-seconds."""
        engines, times = self._inputs.engines, self._inputs.times
        return switch_cost(change_to(fleet, engines), engines, times, self._speed.prompt_s(1.0, 1.0))

    def recommended(
        self, least_cost: float = 0.0, is_allowed: Callable[[FleetCounts], bool] = lambda fleet: True
    ) -> FleetCounts:
        """Return the fleet that would be best, before any rule.

        least_cost: fleets that cost less are left out; is_allowed: other fleets are left out as well

        The closed form does not know what mixing prompts and output in one step costs, so it says which fleets with
        roles, and which without, are worth an estimate, and not which of the two kinds is better. The search begins at
        these and at the current fleet. If none of them attains the aims, those with an engine more are tried before any
        that cost more than the current one. As long as the best one does not attain the aims, the search goes on to
        neighbours that cost no less; then it tries those that cost less.
        """
        limits, current = self._inputs.settings.limits, self._inputs.current
        if not self._load.requests:
            return least_fleet(limits)

        def may_be(fleet: FleetCounts) -> bool:
            return limits.allows(fleet) and limits.cost(fleet) >= least_cost and is_allowed(fleet)

        wide = [one for one in candidates(self._work, current, limits) if may_be(one)]
        kinds = ([one for one in wide if bool(one.both) is has_both] for has_both in (False, True))
        considered = [self._best(kind, self._screened) for kind in kinds if kind] or [clamped(current, limits)]
        if may_be(current):
            considered.insert(0, current)
        considered += [one for one in self._estimates if may_be(one)]
        best = self._best([one for one in dict.fromkeys(considered) if self._may_estimate(one)], self.estimate)
        if not self.attains(best):
            considered += self._before_growth(considered, best, may_be)
        for _ in range(_NUM_ROUNDS):
            is_enough, cost = self.attains(best), limits.cost(best)
            near = [
                one for one in dict.fromkeys(neighbours(best)) if may_be(one) and (limits.cost(one) < cost) == is_enough
            ]
            considered += self._promising(near, best)
            found = self._best([one for one in dict.fromkeys(considered) if self._may_estimate(one)], self.estimate)
            if found == best:
                break
            best = found
        return best

    def _before_growth(
        self, seeds: Sequence[FleetCounts], best: FleetCounts, may_be: Callable[[FleetCounts], bool]
    ) -> list[FleetCounts]:
        """Return neighbours of the seeds that cost more than these, and no more than the best one or the current one.

        The closed form may have taken too few engines to be enough: with one more, a fleet of other roles may do.
        """
        limits, found = self._inputs.settings.limits, list[FleetCounts]()
        high = max(limits.cost(best), limits.cost(self._inputs.current))
        for seed in seeds:
            if seed in self._estimates:
                low = limits.cost(seed)
                near = [one for one in neighbours(seed) if may_be(one) and low < limits.cost(one) <= high]
                found += self._promising(near, seed)
        return found

    def _promising(self, near: Sequence[FleetCounts], best: FleetCounts) -> list[FleetCounts]:
        """Return the neighbours of each cost that are best, by the closed form, where the best fleet is weakest."""
        service, aims = self.estimate(best), self.aims
        ttft = service.ttft_p99_s / aims.ttft_s if aims.ttft_s else 0.0
        itl = service.itl_p99_s / aims.itl_s if aims.itl_s else 0.0

        def weakness(fleet: FleetCounts) -> tuple[float, float]:
            found = self._screened(fleet)
            times = found.ttft_p99_s, found.itl_p99_s
            return times if ttft >= itl else (times[1], times[0])

        by_cost: dict[float, list[FleetCounts]] = {}
        for fleet in sorted(near, key=lambda one: (weakness(one), self.cost_s(one), one)):
            by_cost.setdefault(self._inputs.settings.limits.cost(fleet), []).append(fleet)
        return [fleet for cost in sorted(by_cost) for fleet in by_cost[cost][:_NUM_NEAR]]

    def _may_estimate(self, fleet: FleetCounts) -> bool:
        """Whether a fleet has its estimate, or gets it as one of those that a tick may make."""
        if fleet not in self._estimates and len(self._estimates) >= self._inputs.settings.num_estimates:
            return False
        self.estimate(fleet)
        return True

    def records(self) -> tuple[CandidateRecord, ...]:
        """Describe the fleets that were estimated, the cheapest first."""
        limits = self._inputs.settings.limits
        found = [
            CandidateRecord(
                fleet,
                limits.cost(fleet),
                one.attainment,
                min(one.ttft_p99_s, _LONGEST_S),
                min(one.itl_p99_s, _LONGEST_S),
                self.switch_cost_s(fleet),
            )
            for fleet, one in self._estimates.items()
        ]
        return tuple(sorted(found, key=lambda one: (one.cost, one.fleet)))

    def _screened(self, fleet: FleetCounts) -> ServiceEstimate:
        return self._screen.estimate(fleet, self._load, self._speed, self.aims)

    def _best(self, fleets: Sequence[FleetCounts], estimate: Callable[[FleetCounts], ServiceEstimate]) -> FleetCounts:
        """Return the cheapest fleet that attains the aims; if none does, the cheapest of those that serve best.

        Of fleets that cost the same the current one is taken: a change that costs nothing gains nothing, either.
        """
        current = self._inputs.current
        served = {fleet: estimate(fleet).attainment for fleet in fleets}
        enough = min(self.aims.attainment, max(served.values()) - _NEARLY)
        return min(
            (fleet for fleet in fleets if served[fleet] >= enough),
            key=lambda one: (self.cost_s(one), one != current, one),
        )


def least_fleet(limits: FleetLimits) -> FleetCounts:
    """Return the cheapest fleet that the limits allow."""
    least = FleetCounts(limits.prefill.least, limits.decode.least, limits.both.least)
    found = [
        least,
        least + FleetCounts(both=1),
        *(least + FleetCounts(prefill=p, decode=d) for p in (0, 1) for d in (0, 1)),
    ]
    allowed = [fleet for fleet in found if limits.allows(fleet)]
    return min(allowed, key=lambda fleet: (limits.cost(fleet), -fleet.prefill, fleet), default=least)
