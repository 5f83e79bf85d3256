"""Shows what simulations have found: a table of 80 columns, and a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table

from cluster.commands.simulate.simulation_jobs import PERCENTS, SimulationFigures
from cluster.simulation.simulation_result import Outcome


def labels_of(found: Sequence[SimulationFigures], *, has_rate: bool = True) -> list[str]:
    """Return a name for each simulation: its configuration, and its trace and its rate where they differ."""
    has_traces = len({one.job.trace for one in found}) > 1
    has_rates = has_rate and len({one.job.rate_scale for one in found}) > 1
    return [
        one.job.name
        + (f", {one.job.trace.stem}" if has_traces else "")
        + (f", x{one.job.rate_scale:g}" if has_rates else "")
        for one in found
    ]


def render_figures(found: Sequence[SimulationFigures]) -> RenderableType:
    """Return a row for each simulation; times are in seconds."""
    caption = (
        "TTFT and ITL in seconds; ITL is the 99th percentile of a request's own gaps. done: complete requests of those "
        "offered; busy: engines' time in steps; good: requests that met the aims."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("config", overflow="fold", min_width=8, max_width=14)
    for column in ("req/s", "done", "TTFT p50", "p99", "ITL p50", "p99", "busy", "good", "good/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, one in zip(labels_of(found, has_rate=False), found, strict=True):
        complete = one.outcomes.get(Outcome.COMPLETE.value, 0) / one.num_requests if one.num_requests else 0.0
        times = one.ttft_s, one.itl_s
        table.add_row(
            label,
            _short(one.offered_per_s),
            f"{complete:.1%}",
            *(_short(percentiles[index]) if percentiles else "-" for percentiles in times for index in (0, -1)),
            f"{one.busy_share:.0%}",
            "-" if one.good_share is None else f"{one.good_share:.1%}",
            "-" if one.goodput_per_s is None else _short(one.goodput_per_s),
        )
    return table


def document_of(found: Sequence[SimulationFigures]) -> dict[str, object]:
    """Return all figures, for a JSON file. Times are in seconds."""
    return {
        "raypd_simulation": 1,
        "runs": [
            {
                "config": one.job.name,
                "config_file": None if one.job.config is None else str(one.job.config),
                "trace": str(one.job.trace),
                "faults": None if one.job.faults is None else str(one.job.faults),
                "seed": one.job.seed,
                "scale_rate": one.job.rate_scale,
                "aims": asdict(one.slo),
                "requests": one.num_requests,
                "outcomes": one.outcomes,
                "duration_s": one.duration_s,
                "offered_per_s": one.offered_per_s,
                "ttft_s": _named(one.ttft_s),
                "itl_p99_s": _named(one.itl_s),
                "e2e_s": _named(one.e2e_s),
                "good_share": one.good_share,
                "goodput_per_s": one.goodput_per_s,
                "engine_hours": one.engine_hours,
                "busy_share": one.busy_share,
                "engines": [
                    {"at_s": point.at_s, **msgspec.structs.asdict(point.serving), "starting": point.num_starting}
                    for point in one.fleet
                ],
            }
            for one in found
        ],
    }


def _named(percentiles: Sequence[float]) -> dict[str, float]:
    return {f"p{percent:g}": value for percent, value in zip(PERCENTS, percentiles, strict=False)}


def _short(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
