"""The settings of the request trace that ingresses write."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.settings.internal_tls import require_absolute
from cluster.traces.request_trace import BlockHashes


class RequestTraceConfig(BaseModel):
    """A file with a line for each request: times, lengths and engines, but no texts and no tokens (docs/traces.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path = Field(
        description="Directory on each node for the files, as an absolute path; it is made if it is missing. Only the "
        "user that runs raypd can read the files."
    )
    block_hashes: BlockHashes = Field(
        BlockHashes.PER_FILE,
        description="Hashes of the blocks of prompts, which show what prompts have in common: none; per_file, under a "
        "key for each file that nobody keeps; or cluster, under one key in all files.",
    )
    max_file_mib: int = Field(64, ge=1, le=4096, description="Size at which a further file is begun, in MiB.")
    max_files: int = Field(
        16, ge=1, le=10_000, description="Number of files that each ingress keeps; the oldest ones are removed."
    )

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        return require_absolute(path)
