"""Plans a fleet for a recorded load, before there is a cluster: `raypd plan`.

Beside the recommended fleet stand the best one without roles and the best one with a prefill and a decode role, what a
further engine or a faster link would buy, and how far the answer depends on the error of the step cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from cluster.planning.candidate_fleets import one_of, perfect_bound
from cluster.planning.engine_work import EngineSpeed, Work, WorkPrices, mean_context
from cluster.planning.fleet_change import SwitchTimes
from cluster.planning.fleet_choice import FleetChoice
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts, FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import FleetEstimator, PlanAims, ServiceEstimate, attainable_aims, quantile
from cluster.planning.load_bootstrap import draw_load
from cluster.planning.offered_load import OfferedRequest
from cluster.planning.plan_record import PlanInputs, PlanSettings

_SLICE_S: Final = 60.0
_BUSY_PART: Final = 0.9
"""The quantile of the work of slices that the plan is for: only a tenth of the slices have more."""
_NUM_HALVINGS: Final = 8
_MOST_GROWTH: Final = 8.0
_Z: Final = 1.28
"""Standard deviations within which four of five errors of the step cost model are."""
_LINK_FACTOR: Final = 2.0
_NONE: Final = RoleLimits(0, 0)


class OfflinePlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The limits and the effort of a plan.

    num_requests:  of an estimate
    num_estimates: of each choice
    step_error:    the factor by which steps may be longer or shorter; None: the error of the step cost model says it
    """

    aims: PlanAims
    limits: FleetLimits
    num_requests: int
    num_estimates: int
    step_error: float | None = None
    seed: int = 0


class OfflineFleet(msgspec.Struct, frozen=True):
    """A fleet and its service under the planned load.

    growth: the load may become so many times as large until the aims are missed; below 1 they are missed already
    """

    fleet: FleetCounts
    cost: float
    service: ServiceEstimate
    growth: float


class OfflinePlan(msgspec.Struct, frozen=True):
    """The result.

    mean, planned:    work in engine-seconds per second: of the whole load, and of its busy slices
    least_engines:    the bound for the planned work that no fleet beats
    recommended:      the cheapest fleet of any roles
    by_roles:         the cheapest fleet of prefill and decode engines; None if the budget has no room for one
    without_roles:    the cheapest fleet of engines for both
    one_more:         the recommended fleet and one engine more, of the role that allows the largest load
    faster_link:      the recommended fleet with links of twice the bandwidth; None: it has engines for both, which need
                      no link
    engines_between:  engines of the recommended fleets if steps are faster, or slower, by the model's usual error, or
                      by the error of a guess
    findings:         aims that were replaced since no engine attains them, and aims that the budget does not attain
    """

    mean: Work
    planned: Work
    least_engines: int
    recommended: OfflineFleet
    by_roles: OfflineFleet | None
    without_roles: OfflineFleet | None
    one_more: OfflineFleet | None
    faster_link: OfflineFleet | None
    engines_between: tuple[int, int]
    findings: tuple[str, ...]
    estimated_by: str


def plan_offline(
    requests: Sequence[OfferedRequest], speed: EngineSpeed, settings: OfflinePlanSettings, estimator: FleetEstimator
) -> OfflinePlan:
    """Plan a fleet for these requests, in the order of arrival; there is at least one."""
    planning = _Planning(requests, speed, settings, estimator)
    best = planning.best(settings.limits)
    assert best is not None, "a budget below one engine is refused where it is given"
    limits = settings.limits
    findings = list(planning.findings)
    if best.service.attainment < settings.aims.attainment:
        findings.append(
            f"no fleet within the budget attains the aims: with {best.fleet} "
            f"{best.service.attainment:.0%} of requests would meet them"
        )
    error = settings.step_error or math.exp(_Z * speed.sigma)
    others = [_Planning(requests, speed.slower_by(part), settings, estimator) for part in (1 / error, error)]
    between = [one.engines(limits) for one in others]
    return OfflinePlan(
        mean=planning.mean,
        planned=planning.work,
        least_engines=perfect_bound(planning.work),
        recommended=best,
        by_roles=planning.best(msgspec.structs.replace(limits, both=_NONE)),
        without_roles=planning.best(msgspec.structs.replace(limits, prefill=_NONE, decode=_NONE)),
        one_more=planning.one_more(best.fleet),
        faster_link=None if best.fleet.both else planning.with_faster_link(best.fleet),
        engines_between=(min(between), max(between)),
        findings=tuple(findings),
        estimated_by=estimator.name,
    )


class _Planning:
    """The load of one plan, and the fleets for it at one speed."""

    def __init__(
        self,
        requests: Sequence[OfferedRequest],
        speed: EngineSpeed,
        settings: OfflinePlanSettings,
        estimator: FleetEstimator,
    ) -> None:
        self._requests = requests
        self._speed = speed
        self._settings = settings
        self._estimator = estimator
        self._prices = WorkPrices.at(speed, settings.aims.itl_s, mean_context(requests))
        self._aims, self.findings = attainable_aims(requests, speed, settings.aims)
        self.mean, self.work = _works(requests, self._prices)

    def best(self, limits: FleetLimits) -> OfflineFleet | None:
        """Return the cheapest fleet within the limits, or the one that serves best; None if they allow none."""
        fleet = self._choose(limits)
        return self.describe(fleet) if limits.allows(fleet) else None

    def engines(self, limits: FleetLimits) -> int:
        """Return how many engines the cheapest fleet has."""
        return self._choose(limits).num_engines

    def describe(self, fleet: FleetCounts, speed: EngineSpeed | None = None) -> OfflineFleet:
        """Estimate a fleet. speed: None: that of the plan"""
        service = self._estimate(fleet, 1.0, speed)
        return OfflineFleet(fleet, self._settings.limits.cost(fleet), service, self._growth(fleet, speed))

    def one_more(self, fleet: FleetCounts) -> OfflineFleet | None:
        """Return the fleet with one engine more that carries the largest load."""
        larger = [self.describe(fleet + one_of(role)) for role in PLANNED_ROLES if fleet.of_role(role)]
        return max(larger, key=lambda one: one.growth, default=None)

    def with_faster_link(self, fleet: FleetCounts) -> OfflineFleet:
        """Return the fleet with faster links."""
        faster = msgspec.structs.replace(self._speed, link_bytes_per_s=_LINK_FACTOR * self._speed.link_bytes_per_s)
        return self.describe(fleet, faster)

    def _choose(self, limits: FleetLimits) -> FleetCounts:
        settings = self._settings
        plan_settings = PlanSettings(
            aims=settings.aims,
            limits=limits,
            horizon_s=1.0,
            down_window_s=0.0,
            change_timeout_s=0.0,
            hold_s=0.0,
            quantile=_BUSY_PART,
            num_requests=settings.num_requests,
            num_estimates=settings.num_estimates,
        )
        inputs = PlanInputs(0.0, _SLICE_S, (), (), SwitchTimes(0.0, 0.0), plan_settings, self._speed)
        load = draw_load(self._requests, self._prices, self.work, settings.num_requests, settings.seed)
        return FleetChoice(inputs, self._speed, self.work, load, self._estimator).recommended()

    def _estimate(self, fleet: FleetCounts, factor: float, speed: EngineSpeed | None) -> ServiceEstimate:
        wanted = Work(factor * self.work.prefill_s, factor * self.work.decode_s)
        settings = self._settings
        load = draw_load(self._requests, self._prices, wanted, settings.num_requests, settings.seed)
        return self._estimator.estimate(fleet, load, speed or self._speed, self._aims)

    def _growth(self, fleet: FleetCounts, speed: EngineSpeed | None) -> float:
        """Return the largest factor of the load with which the fleet attains the aims, by halving the interval."""
        low, high = 0.0, _MOST_GROWTH
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if self._estimate(fleet, middle, speed).attainment >= self._aims.attainment:
                low = middle
            else:
                high = middle
        return low


def _works(requests: Sequence[OfferedRequest], prices: WorkPrices) -> tuple[Work, Work]:
    """Return the mean work, and the same mix with the total of the busy slices."""
    begin_s, end_s = requests[0].arrived_at_s, requests[-1].arrived_at_s
    duration_s = max((end_s - begin_s) * len(requests) / max(len(requests) - 1, 1), 1e-3)
    whole = prices.work_of(requests)
    mean = Work(whole.prefill_s / duration_s, whole.decode_s / duration_s)
    num_slices = int(duration_s // _SLICE_S)
    if num_slices < 2:
        return mean, mean
    slices = [0.0] * num_slices
    for request in requests:
        at = int((request.arrived_at_s - begin_s) // _SLICE_S)
        if at < num_slices:
            slices[at] += prices.work_of([request]).total_s / _SLICE_S
    factor = max(quantile(sorted(slices), _BUSY_PART) / mean.total_s, 1.0) if mean.total_s > 0 else 1.0
    return mean, Work(factor * mean.prefill_s, factor * mean.decode_s)
