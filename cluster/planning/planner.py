"""The planner: at each tick it decides how many engines of each role the cluster should have.

plan() is a pure function of what the planner is told and of what it remembers: the controller calls it in a child
process, and a simulation calls it in virtual time. It draws the load of the near future from the requests of the last
hour, at the high end of the forecast, estimates a few fleets under that load, and lets the rules of flap_rules.py
decide whether the change to the best of them is made.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cluster.planning import flap_rules
from cluster.planning.candidate_fleets import perfect_bound
from cluster.planning.engine_work import Work, WorkPrices, mean_context
from cluster.planning.fleet_change import change_to
from cluster.planning.fleet_choice import FleetChoice
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import FleetEstimator
from cluster.planning.load_bootstrap import draw_load
from cluster.planning.offered_load import OfferedRequest
from cluster.planning.plan_record import (
    MadeChange,
    MadeForecast,
    PendingChange,
    PlanAction,
    PlanInputs,
    PlanMemory,
    PlannerMode,
    PlanRecord,
    WorkForecast,
)
from cluster.planning.work_forecast import Forecast, forecast

_MAX_FORECAST_STEPS: Final = 30
_MAX_SAMPLE: Final = 5000
_ROUGH_SIGMA: Final = 0.3


class PlanStep(msgspec.Struct, frozen=True):
    """The result of a tick: the record, and what the planner remembers for the next one."""

    record: PlanRecord
    memory: PlanMemory


def plan(inputs: PlanInputs, memory: PlanMemory, estimator: FleetEstimator, seed: int = 0) -> PlanStep:
    """Decide. Equal arguments give equal results. seed: of the draw of the load"""
    memory, notes = _look_back(inputs, memory)
    if memory.pending is not None and inputs.now_s >= memory.pending.deadline_s:
        return _withdraw(inputs, memory, memory.pending, notes)
    if staleness := flap_rules.find_staleness(inputs):
        return PlanStep(_held(inputs, memory, f"the load is not known: {staleness}", notes), memory)
    if inputs.speed is None:
        return PlanStep(_held(inputs, memory, "no engine can predict its steps yet", notes), memory)
    tick = _Tick(inputs, memory, estimator, seed, notes)
    return tick.decide()


class _Tick:
    """A tick with a known load."""

    def __init__(
        self, inputs: PlanInputs, memory: PlanMemory, estimator: FleetEstimator, seed: int, notes: list[str]
    ) -> None:
        assert inputs.speed is not None
        self._inputs = inputs
        self._memory = memory
        self._estimator = estimator
        self._notes = notes
        self._sample = sample = recent_sample(inputs)
        self._seed = seed
        settings = inputs.settings
        self._prices = WorkPrices.at(inputs.speed, settings.aims.itl_s, mean_context(sample))
        self._rates = self._prices.rates_of(inputs.windows, inputs.window_s)
        self.forecast = self._forecast()
        self._work = Work(self.forecast.prefill.high, self.forecast.decode.high)
        self._choice = self._choice_for(self._work)

    def decide(self) -> PlanStep:
        inputs, current = self._inputs, self._inputs.current
        if self._rates[-1] is None:
            return self._hold("requests came, and none has ended yet, so their work is not known")
        wanted = self._choice.recommended()
        self._memory = flap_rules.remembered(self._memory, wanted, inputs.now_s, flap_rules.window_s(inputs))
        self._note_findings(wanted)
        if self._memory.pending is not None:
            return self._hold(f"the change to {self._memory.pending.target} is under way")
        if inputs.now_s < self._memory.hold_until_s:
            return self._hold("an operator has changed the fleet, and that stands for a while")
        target, reason = self._held_back(wanted)
        if target == current or reason:
            return self._hold(reason or "the fleet is what the load needs")
        return self._change(target)

    def _choice_for(self, work: Work) -> FleetChoice:
        """Return the choice of a fleet for this work; equal draws for all amounts of work."""
        inputs = self._inputs
        assert inputs.speed is not None, "it was checked"
        expected = Work(self.forecast.prefill.value, self.forecast.decode.value)
        load = draw_load(self._sample, self._prices, work, inputs.settings.num_requests, self._seed, mix=expected)
        return FleetChoice(inputs, inputs.speed, work, load, self._estimator)

    # -- the parts of a decision ---------------------------------------------------------------------------------

    def _forecast(self) -> WorkForecast:
        inputs = self._inputs
        num_steps = self._num_windows(inputs.times.start_s)
        prefill, decode = self._forecasts(num_steps)
        due: list[MadeForecast] = []
        still: list[MadeForecast] = []
        by_number = {window.number: rate for window, rate in zip(inputs.windows, self._rates, strict=True)}
        for made in self._memory.forecasts:
            (due if made.first_window + made.num_windows - 1 <= inputs.windows[-1].number else still).append(made)
        first = inputs.windows[-1].number + 1
        if not still or still[-1].first_window < first:
            still.append(MadeForecast(first, num_steps, prefill.value, decode.value))
        self._memory = msgspec.structs.replace(self._memory, forecasts=(*due[-1:], *still))
        return WorkForecast(prefill, decode, _error_of(due[-1], by_number) if due else None)

    def _num_windows(self, seconds: float) -> int:
        """Return how many windows to forecast so that they reach beyond so many seconds."""
        return min(max(math.ceil(seconds / self._inputs.window_s), 0) + 1, _MAX_FORECAST_STEPS)

    def _forecasts(self, num_windows: int) -> tuple[Forecast, Forecast]:
        """Return the forecasts of the work of prompts and of output, for the mean of the next windows."""
        known, part = [rate for rate in self._rates if rate is not None], self._inputs.settings.quantile
        prefill = forecast([rate.prefill_s for rate in known], num_windows, part)
        return prefill, forecast([rate.decode_s for rate in known], num_windows, part)

    def _held_back(self, wanted: FleetCounts) -> tuple[FleetCounts, str]:
        """Return the target after the rules, and why it is not gone to; "" if it is."""
        choice, current, limits = self._choice, self._inputs.current, self._inputs.settings.limits
        if not limits.allows(current):
            return wanted, ""
        target, objection = wanted, ""
        if limits.cost(wanted) < limits.cost(current):
            target, objection = self._after_window(wanted)
            if objection and not choice.attains(current):
                # Engines in other roles may meet the aims, and as many stay.
                target, objection = choice.recommended(limits.cost(current)), ""
        if not objection:
            target, objection = self._without_undoing(target)
        leaning, self._memory = self._memory.leaning, msgspec.structs.replace(self._memory, leaning=target)
        if objection or target == current:
            return current, objection
        if limits.cost(target) > limits.cost(current):
            return target, self._objection_to_growth(target)
        return target, self._objection(target, leaning)

    def _without_undoing(self, target: FleetCounts) -> tuple[FleetCounts, str]:
        """Return the target, or another one that rule 8 allows, or why no change is made."""
        choice, changes, current = self._choice, self._memory.changes, self._inputs.current
        if not flap_rules.undoes(changes, current, target):
            return target, ""
        num_requests = self._inputs.settings.num_requests
        if not flap_rules.misses_clearly(choice.estimate(current), choice.aims.attainment, num_requests):
            return current, f"{target} would undo what has just been changed, and {current} about meets the aims"
        other = choice.recommended(is_allowed=lambda fleet: not flap_rules.undoes(changes, current, fleet))
        return (other if choice.attains(other) else target), ""

    def _after_window(self, wanted: FleetCounts) -> tuple[FleetCounts, str]:
        """Return the smaller fleet that rule 2 and the load of the next window allow, or why they allow none."""
        limits, current = self._inputs.settings.limits, self._inputs.current
        largest = flap_rules.largest_recommended(self._memory, limits)
        if not flap_rules.has_seen_window(self._memory, self._inputs):
            return current, f"{wanted} might do, and the planner has not yet seen a whole window of load"
        if limits.cost(largest) >= limits.cost(current):
            return current, f"{wanted} might do, and {largest} were needed within the window"
        if not self._lasts(largest):
            return current, f"{largest} might do now, and not as the load goes on"
        return largest, ""

    def _objection_to_growth(self, target: FleetCounts) -> str:
        """Return why no further engines start; "" if they do."""
        memory, choice = self._memory, self._choice
        if self._inputs.now_s < memory.no_growth_until_s and target.num_engines >= memory.num_not_placed:
            return f"{target} might do, and there was no room for {memory.num_not_placed} engines lately"
        if not flap_rules.is_better(choice.estimate(target), choice.estimate(self._inputs.current)):
            return f"{target} would serve no better than what there is"
        return ""

    def _objection(self, target: FleetCounts, leaning: FleetCounts | None) -> str:
        """Return why a change to no more engines than there are is not made; "" if it is made.

        leaning: the target of the tick before
        """
        choice, current, limits = self._choice, self._inputs.current, self._inputs.settings.limits
        is_better = flap_rules.is_better(choice.estimate(target), choice.estimate(current))
        if not choice.attains(target) and not is_better:
            return f"those that stay of {target} would miss the aims"
        if leaning is None or not flap_rules.agree(current, target, leaning):
            return f"{target} is wanted for the first time"
        if limits.cost(target) == limits.cost(current) and not is_better:
            return f"{target} would serve no better than what there is"
        gain_s, cost_s = self._gain_s(target), choice.switch_cost_s(target)
        if gain_s <= cost_s:
            return f"{target} would gain {gain_s:.0f} engine-seconds and cost {cost_s:.0f}"
        return ""

    def _lasts(self, target: FleetCounts) -> bool:
        """Whether a fleet would meet the aims for as long as what leaves now may not come back (rules 1 and 8)."""
        prefill, decode = self._forecasts(self._num_windows(flap_rules.window_s(self._inputs)))
        later = Work(max(prefill.high, self._work.prefill_s), max(decode.high, self._work.decode_s))
        return later == self._work or self._choice_for(later).attains(target)

    def _gain_s(self, target: FleetCounts) -> float:
        """Return what a target gains over the horizon: engines that are saved, and work of requests that meet aims."""
        settings, choice, current = self._inputs.settings, self._choice, self._inputs.current
        saved = max(settings.limits.cost(current) - settings.limits.cost(target), 0.0)
        better = max(choice.estimate(target).attainment - choice.estimate(current).attainment, 0.0)
        return settings.horizon_s * (saved + better * self._work.total_s)

    def _note_findings(self, wanted: FleetCounts) -> None:
        choice = self._choice
        if self._inputs.speed is not None and self._inputs.speed.sigma > _ROUGH_SIGMA:
            self._notes.append(
                f"engines predict their steps only to {self._inputs.speed.sigma:.0%}, so the plan is rough"
            )
        self._notes += choice.findings
        if not choice.attains(wanted):
            self._notes.append(
                f"{wanted} is the best fleet within the limits, and {choice.estimate(wanted).attainment:.0%} of "
                f"requests would meet the aims, not {choice.aims.attainment:.0%}"
            )

    # -- results -------------------------------------------------------------------------------------------------

    def _change(self, target: FleetCounts) -> PlanStep:
        inputs = self._inputs
        gain_s = self._gain_s(target)
        reason = f"{self._choice.estimate(target).attainment:.0%} of requests would meet the aims with {target}"
        reason += f", and {self._choice.estimate(inputs.current).attainment:.0%} with {inputs.current}"
        if inputs.mode is PlannerMode.ACT:
            deadline_s = inputs.now_s + inputs.settings.change_timeout_s
            pending = PendingChange(target, inputs.now_s, deadline_s, before=inputs.current)
            self._memory = msgspec.structs.replace(self._memory, pending=pending)
        record = self._record(PlanAction.CHANGE, target, reason)
        change, cost_s = change_to(target, inputs.engines), self._choice.switch_cost_s(target)
        record = msgspec.structs.replace(record, change=change, gain_s=gain_s, switch_cost_s=cost_s)
        return PlanStep(record, self._memory)

    def _hold(self, reason: str) -> PlanStep:
        pending = self._memory.pending
        target = self._inputs.current if pending is None else pending.target
        return PlanStep(self._record(PlanAction.HOLD, target, reason), self._memory)

    def _record(self, action: PlanAction, target: FleetCounts, reason: str) -> PlanRecord:
        return PlanRecord(
            at_s=self._inputs.now_s,
            mode=self._inputs.mode,
            current=self._inputs.current,
            target=target,
            action=action,
            reason=reason,
            findings=tuple(self._notes),
            forecast=self.forecast,
            least_engines=perfect_bound(self._work),
            candidates=self._choice.records(),
            estimated_by=self._estimator.name,
        )


def recent_sample(inputs: PlanInputs) -> list[OfferedRequest]:
    """Return the requests of all windows, in the order of arrival; of very many the newest ones."""
    found = [request for window in inputs.windows for request in window.sample]
    return sorted(found, key=lambda request: request.arrived_at_s)[-_MAX_SAMPLE:]


def _look_back(inputs: PlanInputs, memory: PlanMemory) -> tuple[PlanMemory, list[str]]:
    """Take in what happened since the last tick: a change that came about, or one that an operator made."""
    notes: list[str] = []
    changed = {"num_manual_changes": inputs.num_manual_changes, "began_s": memory.began_s or inputs.now_s}
    memory = msgspec.structs.replace(memory, **changed) if memory.num_manual_changes is None else memory
    if inputs.num_manual_changes != memory.num_manual_changes:
        if memory.pending is not None:
            notes.append(f"an operator has changed the fleet, so the change to {memory.pending.target} is given up")
        return (
            msgspec.structs.replace(
                memory,
                pending=None,
                recommendations=(),
                changes=(),
                began_s=inputs.now_s,
                hold_until_s=inputs.now_s + inputs.settings.hold_s,
                num_manual_changes=inputs.num_manual_changes,
            ),
            notes,
        )
    is_settled = inputs.serving == inputs.current and not any(engine.is_leaving for engine in inputs.engines)
    if memory.pending is not None and is_settled and inputs.serving == memory.pending.target:
        if memory.pending.before is not None:
            change = MadeChange(inputs.now_s, memory.pending.before, memory.pending.target)
            memory = flap_rules.with_change(memory, change)
        memory = msgspec.structs.replace(memory, pending=None)
    return memory, notes


def _withdraw(inputs: PlanInputs, memory: PlanMemory, pending: PendingChange, notes: list[str]) -> PlanStep:
    """Give up a change that takes too long: what serves now stays, and as many engines are not tried for a while."""
    target = inputs.serving if inputs.serving.can_serve else inputs.current
    took_s = inputs.now_s - pending.began_s
    notes.append(f"the change to {pending.target} did not come about within {took_s:.0f} s, and is withdrawn")
    grows = pending.target.num_engines > target.num_engines
    deadline_s = inputs.now_s + inputs.settings.change_timeout_s
    memory = msgspec.structs.replace(
        memory,
        pending=PendingChange(target, inputs.now_s, deadline_s) if target != inputs.current else None,
        no_growth_until_s=deadline_s if grows else memory.no_growth_until_s,
        num_not_placed=pending.target.num_engines if grows else memory.num_not_placed,
    )
    record = msgspec.structs.replace(
        _held(inputs, memory, f"{pending.target} took too long", notes),
        action=PlanAction.WITHDRAW,
        target=target,
        change=change_to(target, inputs.engines),
    )
    return PlanStep(record, memory)


def _held(inputs: PlanInputs, memory: PlanMemory, reason: str, notes: list[str]) -> PlanRecord:
    """Describe a tick that has decided without an estimate."""
    target = inputs.current if memory.pending is None else memory.pending.target
    return PlanRecord(inputs.now_s, inputs.mode, inputs.current, target, PlanAction.HOLD, reason, findings=tuple(notes))


def _error_of(made: MadeForecast, rates: dict[int, Work | None]) -> float | None:
    """Return what came / what was forecast - 1; None if a window is missing or nothing was forecast."""
    came = [rates.get(made.first_window + index) for index in range(made.num_windows)]
    known = [rate for rate in came if rate is not None]
    expected = made.prefill + made.decode
    if len(known) < len(came) or expected <= 0:
        return None
    return sum(rate.total_s for rate in known) / len(known) / expected - 1
