"""The settings of restarts: how often what dies is started again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RestartConfig(BaseModel):
    """How often an engine, or an ingress, that dies is started again. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_s: float = Field(600.0, gt=0, description="Only deaths within this time count.")
    first_backoff_s: float = Field(
        1.0, ge=0, description="Wait before the second restart; every further wait is twice as long."
    )
    max_backoff_s: float = Field(60.0, ge=0, description="The longest wait between two restarts.")
    max_deaths: int = Field(
        5, ge=1, description="Deaths within the window after which nothing is restarted for quarantine_s."
    )
    quarantine_s: float = Field(
        600.0, ge=0, description="How long an engine or an ingress that died too often stays down."
    )
