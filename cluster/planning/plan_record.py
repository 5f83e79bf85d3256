"""The planner's inputs, its memory and its records. They are values, which are kept and sent as JSON."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cluster.planning.engine_work import EngineSpeed
from cluster.planning.fleet_change import FleetChange, PlannedEngine, SwitchTimes
from cluster.planning.fleet_counts import FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import PlanAims
from cluster.planning.offered_load import LoadWindow
from cluster.planning.work_forecast import Forecast

SCHEMA: int = 1
"""The version of the fields of PlanRecord; it grows when one of them changes its meaning."""


class PlannerMode(StrEnum):
    """The use of the planner's targets."""

    NONE = "none"
    """There is no planner."""
    ADVISE = "advise"
    """The status shows what the planner would do."""
    ACT = "act"
    """The controller brings the cluster to the planner's target."""


class PlanAction(StrEnum):
    """The result of a tick of the planner."""

    HOLD = "hold"
    """Everything stays as it is."""
    CHANGE = "change"
    """There is a new target."""
    WITHDRAW = "withdraw"
    """A change did not come about in time, so the target is what serves now."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's settings, in seconds.

    horizon_s:        the time over which a change has to gain more than it costs
    down_window_s:    engines leave only if so long no more engines were needed
    change_timeout_s: a change that takes longer is withdrawn
    hold_s:           after a change by an operator the planner does nothing for so long
    quantile:         the quantile of the forecast that is planned for
    num_requests:     requests of an estimate
    num_estimates:    estimates of a tick
    """

    aims: PlanAims
    limits: FleetLimits
    horizon_s: float
    down_window_s: float
    change_timeout_s: float
    hold_s: float
    quantile: float
    num_requests: int
    num_estimates: int


class PlanInputs(msgspec.Struct, frozen=True):
    """The planner's inputs at a tick.

    now_s:              Unix time
    window_s:           the length of a window
    windows:            complete windows of the last hour, the oldest first
    speed:              of an engine; None: no engine can predict its steps yet
    engines:            all engines, those that start or leave as well
    num_manual_changes: how often operators have changed the fleet
    """

    now_s: float
    window_s: float
    windows: tuple[LoadWindow, ...]
    engines: tuple[PlannedEngine, ...]
    times: SwitchTimes
    settings: PlanSettings
    speed: EngineSpeed | None = None
    mode: PlannerMode = PlannerMode.ADVISE
    num_manual_changes: int = 0

    @property
    def current(self) -> FleetCounts:
        """The engines that serve or start, by their roles now."""
        return FleetCounts.of(engine.role for engine in self.engines if not engine.is_leaving)

    @property
    def serving(self) -> FleetCounts:
        """The engines that serve, by their roles now."""
        return FleetCounts.of(one.role for one in self.engines if one.is_serving and not one.is_leaving)


class Recommendation(msgspec.Struct, frozen=True):
    """The fleet that a tick would have had, before any rule."""

    at_s: float
    fleet: FleetCounts


class PendingChange(msgspec.Struct, frozen=True):
    """A change under way. before: the fleet that it changes; None: it takes back what did not come about"""

    target: FleetCounts
    began_s: float
    deadline_s: float
    before: FleetCounts | None = None


class MadeChange(msgspec.Struct, frozen=True):
    """A change that has come about. at_s: the tick that found it so"""

    at_s: float
    before: FleetCounts
    after: FleetCounts


class MadeForecast(msgspec.Struct, frozen=True):
    """A forecast for the mean of windows, which is compared with what came."""

    first_window: int
    num_windows: int
    prefill: float
    decode: float


class PlanMemory(msgspec.Struct, frozen=True):
    """The planner's memory from one tick to the next. The controller saves it for its successor.

    pending:            the change under way; only in the mode `act`
    began_s:            the first tick; None: there was none
    no_growth_until_s:  until then no fleet is planned that is as large as num_not_placed engines: these found no room
    hold_until_s:       until then an operator's change stands
    num_manual_changes: as of the last tick; None: there was none
    leaning:            the target of the last tick, before it was held back
    changes:            the planner's own changes that have come about within the window, the oldest first
    """

    recommendations: tuple[Recommendation, ...] = ()
    pending: PendingChange | None = None
    began_s: float | None = None
    no_growth_until_s: float = 0.0
    num_not_placed: int = 0
    hold_until_s: float = 0.0
    num_manual_changes: int | None = None
    leaning: FleetCounts | None = None
    changes: tuple[MadeChange, ...] = ()
    forecasts: tuple[MadeForecast, ...] = ()


class WorkForecast(msgspec.Struct, frozen=True):
    """The forecast work, in engine-seconds per second: the engines that it keeps busy.

    prefill, decode: of prompts and of output
    last_error:      of the newest forecast whose time is over: what came / what was forecast - 1; None without one
    """

    prefill: Forecast = Forecast()
    decode: Forecast = Forecast()
    last_error: float | None = None


class CandidateRecord(msgspec.Struct, frozen=True):
    """A fleet that was considered.

    cost:          its GPUs; an engine without GPUs counts as one
    attainment:    the part of requests that would meet their aims
    switch_cost_s: what the change to it costs, in engine-seconds
    """

    fleet: FleetCounts
    cost: float
    attainment: float
    ttft_p99_s: float
    itl_p99_s: float
    switch_cost_s: float


class PlanRecord(msgspec.Struct, frozen=True):
    """The result of a tick.

    at_s:         Unix time
    current:      the engines that serve or start
    target:       the engines that there should be
    change:       the way from the one to the other
    reason:       why, in words
    findings:     what an operator has to know, such as an aim that no number of engines attains
    least_engines: the bound below which no fleet can do the forecast work
    gain_s:       what the change gains over the horizon, in engine-seconds
    estimated_by: simulation or closed_form
    """

    at_s: float
    mode: PlannerMode
    current: FleetCounts
    target: FleetCounts
    action: PlanAction
    reason: str
    change: FleetChange = FleetChange()
    findings: tuple[str, ...] = ()
    forecast: WorkForecast = WorkForecast()
    least_engines: int = 0
    candidates: tuple[CandidateRecord, ...] = ()
    gain_s: float = 0.0
    switch_cost_s: float = 0.0
    estimated_by: str = ""
    schema: int = SCHEMA

    @property
    def steps(self) -> str:
        """The way from the current engines to the target, in words."""
        return str(self.change)

    def to_json(self) -> bytes:
        """Return the record as a JSON object."""
        return msgspec.json.encode(self)
