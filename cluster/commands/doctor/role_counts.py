"""Judges the roles of a cluster's engines: which ways its requests can take."""

from __future__ import annotations

from typing import Final

from cluster.commands.doctor.findings import Finding, ok, warning
from cluster.config import ClusterConfig
from cluster.routing.engine_connection import EngineRole
from cluster.settings.routing import RoutingMode

_CHECK: Final = "roles"


def judge_roles(config: ClusterConfig) -> Finding:
    """Say how requests are served by engines of these roles. A cluster of a single role is allowed."""
    counts = {role: config.group(role).count for role in EngineRole if role is not EngineRole.ENCODE}
    found = ", ".join(f"{count} {role.value}" for role, count in counts.items() if count)
    has_pairs = bool(counts[EngineRole.PREFILL] and counts[EngineRole.DECODE])
    if has_pairs or counts[EngineRole.BOTH]:
        return ok(_CHECK, found)
    if config.routing.mode is RoutingMode.DISAGGREGATE:
        advice = "add engines of the other role, or leave routing.mode at cost"
        return warning(_CHECK, f"{found}: no pair that could hand over, as routing.mode: disaggregate wants", advice)
    return ok(_CHECK, f"{found}: each engine does all of its requests, without handoffs")
