"""The part of `raypd status` about the planner: its target, the reason, the forecast and its error."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.status.wide_table import WideTable, age

_ROLES = ("prefill", "decode", "both")


def render_plan(status: admin_pb2.GetStatusResponse) -> list[RenderableType]:
    """Return a table of the planner's newest decision and lines with its reason; nothing without a decision."""
    if not status.HasField("planner"):
        return []
    plan = status.planner
    columns = (" ", *_ROLES, "prefill work", "decode work", "at least", "forecast error", "as of")
    error = f"{plan.forecast_error:+.0%}" if plan.HasField("forecast_error") else "-"
    forecast = (
        f"{plan.prefill_work:.2f} (≤ {plan.prefill_work_high:.2f})",
        f"{plan.decode_work:.2f} (≤ {plan.decode_work_high:.2f})",
        plan.least_engines,
        error,
        age(plan.age_seconds),
    )
    rows = [
        ["now", *(getattr(plan.current, role) for role in _ROLES), *forecast],
        ["target", *(getattr(plan.target, role) for role in _ROLES), *("" for _ in forecast)],
    ]
    lines: list[RenderableType] = [WideTable(f"planner: {plan.mode}, {plan.action}", columns, rows)]
    lines.append(f"reason: {escape(plan.reason)}")
    if plan.action != "hold":
        lines.append(f"steps: {escape(plan.steps)}")
    lines += [f"[yellow]{escape(finding)}[/]" for finding in plan.findings]
    lines.append("work: engine-seconds per second that are forecast, with the quantile that is planned for in brackets")
    return lines
