"""The settings of the planner: how many engines of each role a cluster may have, and when it may change."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.access.aims import Aims
from cluster.planning.fleet_counts import FleetLimits, RoleLimits
from cluster.planning.fleet_estimate import PlanAims
from cluster.planning.plan_record import PlannerMode, PlanSettings


class RoleRange(BaseModel):
    """The numbers of engines of one role between which the planner chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: int = Field(0, ge=0, le=1024, description="Fewest engines.")
    max: int = Field(1024, ge=0, le=1024, description="Most engines.")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must be at most max ({self.max})")
        return self


class PlannerConfig(BaseModel):
    """The planner, which forecasts the load and says how many engines of each role it needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: PlannerMode = Field(
        PlannerMode.NONE,
        description="none: there is no planner. advise: the status shows what the planner would do. act: the planner "
        "changes roles, starts engines and removes them.",
    )
    interval_s: float = Field(30.0, ge=1.0, description="Seconds between two decisions, and of a window of load.")
    attainment: float = Field(
        0.9, gt=0.5, lt=1, description="Part of the offered requests that has to meet the aims of slo (0.5 to 1)."
    )
    quantile: float = Field(
        0.9, gt=0.5, lt=1, description="Quantile of the forecast of the load that is planned for (0.5 to 1)."
    )
    horizon_s: float = Field(
        600.0, gt=0, description="Seconds over which a change has to gain more engine time than it costs."
    )
    down_window_s: float = Field(
        300.0,
        ge=0,
        description="Engines are removed only down to the most that were needed at any time within these seconds; at "
        "least the time of a start and a drain.",
    )
    change_timeout_s: float = Field(
        600.0, gt=0, description="Seconds after which a change that has not come about is withdrawn."
    )
    hold_s: float = Field(
        300.0, ge=0, description="Seconds for which the planner changes nothing after a change by an operator."
    )
    estimate_requests: int = Field(
        150, ge=20, le=10_000, description="Number of requests with which the planner estimates a number of engines."
    )
    max_estimates: int = Field(10, ge=2, le=64, description="Most numbers of engines that one decision estimates.")
    max_engines: int | None = Field(
        None,
        ge=1,
        le=3072,
        description="Most engines of these three roles together; default: no limit.",
    )
    max_gpus: float | None = Field(
        None, gt=0, description="Most GPUs that these engines reserve together; default: no limit."
    )
    prefill: RoleRange = Field(RoleRange(), description="Number of prefill engines.")
    decode: RoleRange = Field(RoleRange(), description="Number of decode engines.")
    both: RoleRange = Field(RoleRange(), description="Number of engines that prefill and decode.")

    def plan_settings(self, aims: Aims, gpus_per_engine: tuple[float, float, float]) -> PlanSettings:
        """Return the settings in the planner's own form.

        aims:            of requests that name none
        gpus_per_engine: of an engine of the roles prefill, decode and both
        """
        slo = aims.slo
        most = self.prefill.max + self.decode.max + self.both.max
        return PlanSettings(
            aims=PlanAims(
                None if slo is None else slo.ttft_s, None if slo is None else slo.itl_s, attainment=self.attainment
            ),
            limits=FleetLimits(
                RoleLimits(self.prefill.min, self.prefill.max),
                RoleLimits(self.decode.min, self.decode.max),
                RoleLimits(self.both.min, self.both.max),
                max_engines=most if self.max_engines is None else self.max_engines,
                max_gpus=self.max_gpus,
                gpus_per_engine=gpus_per_engine,
            ),
            horizon_s=self.horizon_s,
            down_window_s=self.down_window_s,
            change_timeout_s=self.change_timeout_s,
            hold_s=self.hold_s,
            quantile=self.quantile,
            num_requests=self.estimate_requests,
            num_estimates=self.max_estimates,
        )
