"""Checks the service-level aims that a request gives."""

from __future__ import annotations

from typing import Final

from cluster.access.aims import AIMS, MAX_AIM_MS, Aims
from cluster.parameters.sampling_rules import Violations

_ALLOWED: Final = f"more than 0, at most {MAX_AIM_MS:.0f} (an hour)"


def check_slo(aims: Aims, violations: Violations) -> None:
    """Check the range of each aim. NaN is in no range."""
    for name in AIMS:
        aim_ms = getattr(aims, name)
        violations.require(aim_ms is None or 0 < aim_ms <= MAX_AIM_MS, f"slo.{name}", aim_ms, _ALLOWED)
