"""Prints the result of `raypd plan`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts
from cluster.planning.fleet_estimate import PlanAims
from cluster.planning.offline_plan import OfflineFleet, OfflinePlan

_COLUMNS: Final = ("", "engines", "GPUs", "meet the aims", "TTFT p99", "ITL p99", "load may grow to")
_MOST_S: Final = 1e5


def render_offline_plan(plan: OfflinePlan, aims: PlanAims, command: str, warning: str) -> RenderableType:
    """Return the plan as text. command: starts the recommended fleet; warning: "" if steps were measured"""
    table = Table(box=None, pad_edge=False, title="fleets", title_justify="left")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right")
    for name, fleet in _rows(plan):
        table.add_row(name, *_cells(fleet))
    parts: list[RenderableType] = [f"[bold red]{escape(warning)}[/]"] if warning else []
    parts += [
        f"work: {plan.mean.total_s:.2f} engine-seconds per second on average",
        f"planned for: {plan.planned.total_s:.2f} in busy minutes, {plan.planned.prefill_s:.2f} of it for prompts",
        f"perfect system: {plan.least_engines} engines; no fleet can do with fewer",
        f"aims: TTFT {_ms(aims.ttft_s)}, ITL {_ms(aims.itl_s)}, for {aims.attainment:.0%} of requests",
        table,
        *_gains(plan),
        _confidence(plan, is_guess=bool(warning)),
        *(f"[yellow]{escape(finding)}[/]" for finding in plan.findings),
        f"estimated by: {plan.estimated_by.replace('_', ' ')}",
        f"to start it: {escape(command)}",
    ]
    return Group(*parts)


def manifests_command(
    fleet: FleetCounts, model: str, gpu: str | None, num_ranks: int, config_file: Path | None = None
) -> str:
    """Return the command that prints the manifests of a fleet. gpu: as `raypd manifests` takes it"""
    parts = ["raypd", "manifests", *(["--config", str(config_file)] if config_file else [])]
    for role in PLANNED_ROLES:
        parts += [f"--{role.value}", str(fleet.of_role(role))]
    parts += ["--model", model, *(["--gpu", gpu] if gpu else [])]
    return shlex.join([*parts, *(["--tp", str(num_ranks)] if num_ranks > 1 else [])])


def _rows(plan: OfflinePlan) -> Iterator[tuple[str, OfflineFleet]]:
    yield "recommended", plan.recommended
    if plan.by_roles is not None and plan.by_roles.fleet != plan.recommended.fleet:
        yield "prefill and decode apart", plan.by_roles
    if plan.without_roles is not None and plan.without_roles.fleet != plan.recommended.fleet:
        yield "aggregated", plan.without_roles
    if plan.one_more is not None:
        yield "one engine more", plan.one_more
    if plan.faster_link is not None:
        yield "links twice as fast", plan.faster_link


def _cells(one: OfflineFleet) -> tuple[str, ...]:
    service = one.service
    times = (_ms(service.ttft_p99_s), _ms(service.itl_p99_s))
    return (str(one.fleet), f"{one.cost:g}", f"{service.attainment:.0%}", *times, f"{one.growth:.0%}")


def _gains(plan: OfflinePlan) -> Iterator[str]:
    """Yield a line for each thing that could be bought."""
    before = plan.recommended.growth
    for name, after in (("one engine more", plan.one_more), ("links twice as fast", plan.faster_link)):
        if after is not None:
            gained = after.growth - before
            told = f"{gained:+.0%} of the load" if abs(gained) >= 0.02 else "nothing"
            yield f"{name} ({after.fleet}) {'buy' if name.startswith('links') else 'buys'} {told}"
    if plan.faster_link is None:
        yield "links twice as fast buy nothing: engines for both keep requests where their prompts were computed"


def _confidence(plan: OfflinePlan, *, is_guess: bool) -> str:
    """Return the numbers of engines within the error of the steps' durations."""
    least, most = plan.engines_between
    between = f"{least} to {most} engines" if least != most else f"{most} engine{'s' if most > 1 else ''}"
    if is_guess:
        return f"confidence: none, as nothing was measured; {between}, if steps take from half to twice the guess"
    return f"confidence: {between}, if steps are as much faster or slower than predicted as four of five are at most"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "any"
    return f"{1e3 * seconds:.0f} ms" if seconds < _MOST_S else "-"
