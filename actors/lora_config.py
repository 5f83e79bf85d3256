"""The settings of LoRA adapters: which ones requests may name, and how many an engine keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

_PART: Final = "[A-Za-z0-9_][A-Za-z0-9._:-]*"
ADAPTER_NAME_PATTERN: Final = f"^{_PART}(/{_PART})*$"
MAX_ADAPTER_NAME_CHARS: Final = 128
ADAPTER_NAME_RULE: Final = (
    f"letters, digits, and ._:- within a name, parts separated by slashes, {MAX_ADAPTER_NAME_CHARS} characters at most"
)

AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME_PATTERN, max_length=MAX_ADAPTER_NAME_CHARS)]


class LoraConfig(BaseModel):
    """LoRA adapters in PEFT's format: directories with an adapter_config.json and an adapter_model.safetensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapters: dict[AdapterName, str] = Field(
        default_factory=dict,
        description="Directory of each adapter, by the name that requests give. An engine loads these adapters when it "
        "starts.",
    )
    allowed_directories: tuple[str, ...] = Field(
        (),
        description="Directories that have the files of further adapters below them. When a request names an adapter "
        "that is not loaded, an engine loads it from the subdirectory of that name. By default there are no such "
        "directories, and only the adapters in lora.adapters can be used.",
    )
    max_lora_rank: int = Field(
        16,
        ge=1,
        le=1024,
        description="The highest rank of an adapter; an adapter of a higher rank is refused. Every slot of a batch has "
        "memory for matrices of this rank.",
    )
    max_cpu_loras: int = Field(
        16,
        ge=1,
        description="The most adapters that an engine keeps in memory. When it loads another one, it drops the least "
        "recently used one.",
    )
    max_adapter_mib: int = Field(
        512, ge=1, description="The largest size of an adapter's weights, in MiB; a larger adapter is refused."
    )
    load_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a request waits for its adapter to be loaded; after that it fails."
    )

    @model_validator(mode="after")
    def _means_the_same_everywhere(self) -> LoraConfig:
        for directory in (*self.adapters.values(), *self.allowed_directories):
            if not Path(directory).is_absolute():
                raise ValueError(f"{directory!r} is a relative path; give an absolute path, the same on every node")
        return self

    @model_validator(mode="after")
    def _has_room(self) -> LoraConfig:
        if len(self.adapters) > self.max_cpu_loras:
            raise ValueError(
                f"adapters lists {len(self.adapters)} adapters, more than max_cpu_loras ({self.max_cpu_loras}): an "
                "engine could not keep all the adapters that it loads when it starts"
            )
        return self

    def permits(self, directory: str) -> bool:
        """Whether adapters may be read from a directory, after symbolic links in both paths are resolved."""
        if directory in self.adapters.values():
            return True
        real = Path(directory).resolve()
        return any(real.is_relative_to(Path(allowed).resolve()) for allowed in self.allowed_directories)


def is_adapter_name(name: str) -> bool:
    """Whether the text is a valid name of an adapter."""
    return len(name) <= MAX_ADAPTER_NAME_CHARS and re.fullmatch(ADAPTER_NAME_PATTERN, name) is not None
