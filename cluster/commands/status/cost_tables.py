"""`raypd status --cost`: what the engines' steps take, as each engine predicts it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.status.wide_table import WideTable, age


def render_costs(status: admin_pb2.GetStatusResponse) -> RenderableType:
    """Return tables of the engines' predictions of their steps: how good they are, and the coefficients."""
    engines = [engine for engine in status.engines if engine.HasField("step_costs")]
    if not engines:
        return "no engine has reported what its steps take"
    return Group(_cost_errors(engines), _cost_coefficients(engines))


def _cost_errors(engines: Sequence[admin_pb2.EngineStatus]) -> WideTable:
    columns = [" engine", " sure", " from", "steps", "corrected", "age", " errors of decode, prefill and mixed steps"]
    rows = [
        [
            engine.engine_id,
            "yes" if engine.step_costs.is_sure else "not yet",
            engine.step_costs.origin.replace("_", " "),
            engine.step_costs.steps,
            engine.step_costs.drifts,
            age(engine.step_costs.age_seconds) if engine.step_costs.steps else "-",
            ", ".join(
                f"{one.kind} {one.median:+.0%} ({one.low:+.0%} to {one.high:+.0%})"
                for one in engine.step_costs.residuals
                if one.steps
            )
            or "-",
        ]
        for engine in engines
    ]
    return WideTable("predicted durations of steps: median error (10 % to 90 %)", columns, rows)


def _cost_coefficients(engines: Sequence[admin_pb2.EngineStatus]) -> WideTable:
    names = sorted({name for engine in engines for name in engine.step_costs.seconds_by_feature})
    rows = [
        [engine.engine_id, *(f"{engine.step_costs.seconds_by_feature.get(name, 0.0) * 1e6:.4g}" for name in names)]
        for engine in engines
    ]
    return WideTable("microseconds for each", [" engine", *(name.replace("_", " ") for name in names)], rows)
