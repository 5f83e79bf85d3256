"""The settings of the recording of decisions."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


class DecisionRecordingConfig(BaseModel):
    """Files with all that schedulers and routers are told, and digests of what they decide (docs/traces.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path = Field(
        description="Directory on each node for the files, as an absolute path; it is made if it is missing. Only the "
        "user that runs raypd can read the files, which contain the tokens of prompts and answers."
    )
    max_file_mib: int = Field(
        256, ge=1, le=65_536, description="Size at which the recording of an engine or an ingress ends, in MiB."
    )

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError(f"{path} is no absolute path")
        return path
