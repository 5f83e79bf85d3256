"""The settings of restarts of engines and ingresses that die."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RestartConfig(BaseModel):
    """Restarts of engines and ingresses that die. The first restart within window_s is immediate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_s: float = Field(600.0, gt=0, description="Seconds for which a death counts.")
    first_backoff_s: float = Field(
        1.0, ge=0, description="Seconds to wait before the second restart; each further wait is twice as long."
    )
    max_backoff_s: float = Field(60.0, ge=0, description="Longest wait between two restarts, in seconds.")
    max_deaths: int = Field(
        5, ge=1, description="Number of deaths within window_s after which there is no restart for quarantine_s."
    )
    quarantine_s: float = Field(
        600.0, ge=0, description="Seconds for which an engine or ingress that has died max_deaths times stays down."
    )
