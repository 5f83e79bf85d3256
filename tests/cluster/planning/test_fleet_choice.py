"""The choice of a fleet by estimates."""

from __future__ import annotations

import msgspec

from cluster.planning.engine_work import EngineSpeed, Work, WorkPrices
from cluster.planning.fleet_choice import FleetChoice, least_fleet
from cluster.planning.fleet_counts import FleetCounts, FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims, ServiceEstimate
from cluster.planning.load_bootstrap import DrawnLoad, draw_load
from cluster.planning.plan_record import PlanInputs
from tests.cluster.planning.plan_setup import SPEED, fleet, inputs, windows

LOAD = windows([12.0] * 20)
PRICES = WorkPrices.at(SPEED, 0.02, 1050.0)


class Rules:
    """An estimator that is told what fleets attain, and notes which ones it was asked for."""

    name = "simulation"

    def __init__(self, least_prefill: int, least_decode: int) -> None:
        self._least = least_prefill, least_decode
        self.asked: list[FleetCounts] = []

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Meet the aims if there are enough engines of each role."""
        self.asked.append(fleet)
        missing = max(self._least[0] - fleet.prefill, 0) + max(self._least[1] - fleet.decode, 0)
        return ServiceEstimate(max(1.0 - 0.2 * missing, 0.0))


def _choice(told: PlanInputs, estimator: ClosedFormEstimator | Rules, work: Work) -> FleetChoice:
    sample = [request for window in told.windows for request in window.sample]
    return FleetChoice(told, SPEED, work, draw_load(sample, PRICES, work, 200, seed=1), estimator)


def test_the_cheapest_fleet_that_attains_the_aims_is_recommended() -> None:
    choice = _choice(inputs(LOAD, fleet(1, 1)), ClosedFormEstimator(), Work(1.3, 0.4))
    best = choice.recommended()
    assert choice.attains(best)
    cheaper = [one for one in choice.records() if one.cost < best.num_engines]
    assert cheaper
    assert all(not choice.attains(one.fleet) for one in cheaper)


def test_the_estimator_decides_where_it_disagrees_with_the_closed_form() -> None:
    rules = Rules(3, 2)
    choice = _choice(inputs(LOAD, fleet(2, 1)), rules, Work(1.3, 0.4))
    assert choice.recommended() == FleetCounts(3, 2)
    assert len(rules.asked) == len(set(rules.asked)), "a fleet is estimated once"
    assert len(rules.asked) <= 24


class NoMixing(Rules):
    """An estimator for which engines that do both are of no use."""

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Meet no aim if any engine has both roles."""
        found = super().estimate(fleet, load, speed, aims)
        return ServiceEstimate(0.0) if fleet.both else found


def test_fleets_with_roles_are_estimated_even_if_the_closed_form_prefers_others() -> None:
    told = inputs(LOAD, fleet(both=2))
    assert _choice(told, ClosedFormEstimator(), Work(1.3, 0.4)).recommended().both
    told = msgspec.structs.replace(told, settings=msgspec.structs.replace(told.settings, num_estimates=8))
    rules = NoMixing(2, 1)
    assert _choice(told, rules, Work(1.3, 0.4)).recommended() == FleetCounts(2, 1)
    assert len(rules.asked) <= 8


class MixingCosts(Rules):
    """An estimator for which four engines that mix prompts and output are as good as two for prompts and one more."""

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Meet the aims with as many engines."""
        if not fleet.both:
            return super().estimate(fleet, load, speed, aims)
        self.asked.append(fleet)
        return ServiceEstimate(1.0 if fleet.num_engines >= 4 else 0.85)


def test_roles_are_tried_before_more_engines_even_if_the_closed_form_wants_too_few_of_them() -> None:
    # The closed form takes a prefill and a decode engine to be enough. Three engines of the right roles are.
    told = inputs(LOAD, fleet(decode=1, both=2))
    told = msgspec.structs.replace(told, settings=msgspec.structs.replace(told.settings, num_estimates=10))
    rules = MixingCosts(2, 1)
    assert _choice(told, rules, Work(0.5, 0.3)).recommended() == FleetCounts(2, 1)
    assert FleetCounts(1, 1) in rules.asked
    assert len(rules.asked) <= 10


def test_a_role_change_is_preferred_to_a_new_engine() -> None:
    choice = _choice(inputs(LOAD, fleet(3, 1)), Rules(2, 2), Work(1.3, 0.4))
    assert choice.recommended() == FleetCounts(2, 2)


def test_a_role_change_whose_price_is_above_that_of_an_engine_is_not_preferred() -> None:
    engines = fleet(3, 1, num_cached_tokens=100_000_000)
    choice = _choice(inputs(LOAD, engines), Rules(2, 2), Work(1.3, 0.4))
    assert choice.recommended() == FleetCounts(3, 2)


def test_fleets_that_are_to_be_left_out_are_not_recommended() -> None:
    choice = _choice(inputs(LOAD, fleet(4, 4)), Rules(1, 1), Work(0.5, 0.4))
    assert choice.recommended(least_cost=8).num_engines >= 8


def test_without_load_the_least_fleet_will_do() -> None:
    choice = FleetChoice(inputs(LOAD, fleet(2, 2)), SPEED, Work(), DrawnLoad(), ClosedFormEstimator())
    assert choice.recommended() == FleetCounts(both=1)
    assert choice.records() == ()


def test_the_least_fleet_obeys_the_limits() -> None:
    assert least_fleet(FleetLimits(both=RoleLimits(0, 0))) == FleetCounts(1, 1)
    assert least_fleet(FleetLimits(decode=RoleLimits(2))) == FleetCounts(1, 2)
    gpus = FleetLimits(gpus_per_engine=(1.0, 1.0, 4.0))
    assert least_fleet(gpus) == FleetCounts(1, 1)


def test_the_records_of_candidates_have_no_infinite_numbers() -> None:
    choice = _choice(inputs(LOAD, fleet(1, 1)), ClosedFormEstimator(), Work(5.0, 0.4))
    choice.estimate(FleetCounts(1, 1))
    assert msgspec.json.decode(msgspec.json.encode(choice.records()))[0]["ttft_p99_s"] == 1e6
