"""The settings that an ingress under attack has different; by default none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """ingress: settings of that name; model: a checkpoint's directory instead of the demo model's."""

    ingress: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    max_model_len: int = 131_072
