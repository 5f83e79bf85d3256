"""Draws what simulations have found: goodput over rate, the distributions of TTFT and ITL, engines over time.

matplotlib comes with the extra `plan`; nothing else of raypd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from cluster.commands.simulate.simulation_jobs import SimulationFigures
from cluster.commands.simulate.simulation_report import labels_of
from cluster.errors import InvalidConfig
from cluster.planning.fleet_counts import PLANNED_ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES: Final = (6.4, 3.6)
_DOTS_PER_INCH: Final = 80
_COLOURS: Final = ("tab:blue", "tab:orange", "tab:green", "tab:grey")
_STYLES: Final = ("-", "--", ":", "-.")
_MAX_CURVES: Final = 12
"""A plot with more curves could not be read: of more simulations only the first ones have curves."""


def check_plots(directory: Path) -> None:
    """Make the directory, and raise InvalidConfig if plots cannot be drawn, before anything is simulated."""
    try:
        import matplotlib.figure  # noqa: F401  # to see whether it is there
    except ImportError as error:
        raise InvalidConfig("--plots", ["plots need matplotlib: pip install 'raypd[plan]'"]) from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--plots {directory}", [f"it cannot be made: {error.strerror}"]) from error


def draw_plots(found: Sequence[SimulationFigures], directory: Path) -> list[Path]:
    """Write the plots (PNG) into a directory that check_plots() has made, and return their files.

    Raises InvalidConfig if a file cannot be written.
    """
    drawn = {
        "goodput.png": _goodput,
        "ttft.png": lambda axes, found: _distributions(axes, found, "TTFT (s)", lambda one: one.ttft_curve_s),
        "itl.png": lambda axes, found: _distributions(
            axes, found, "99th percentile of a request's ITL (s)", lambda one: one.itl_curve_s
        ),
        "engines.png": _engines,
    }
    return [_save(directory / name, draw, found) for name, draw in drawn.items()]


def _save(
    path: Path, draw: Callable[[Axes, Sequence[SimulationFigures]], None], found: Sequence[SimulationFigures]
) -> Path:
    # Not pyplot: it would keep figures for a window, and choose one for the platform.
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    draw(axes, found)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
    try:
        # Without a date and a version, the same simulations give the same bytes.
        figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    except OSError as error:
        raise InvalidConfig(f"--plots {path}", [f"it cannot be written: {error.strerror}"]) from error
    return path


def _goodput(axes: Axes, found: Sequence[SimulationFigures]) -> None:
    """Draw a curve for each cluster and trace; without aims, complete requests count."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for label, one in zip(labels_of(found, has_rate=False), found, strict=True):
        curves.setdefault(label, []).append((one.offered_per_s, one.goodput_per_s or _complete_per_s(one)))
    for label, points in curves.items():
        offered, good = zip(*sorted(points), strict=True)
        axes.plot(offered, good, marker="o", label=label)
    most = max((one.offered_per_s for one in found), default=0.0)
    axes.plot([0, most], [0, most], color="grey", linestyle=":", linewidth=1)
    has_aims = any(one.goodput_per_s is not None for one in found)
    axes.set(xlabel="offered requests/s", ylabel="requests/s that met the aims" if has_aims else "complete requests/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _distributions(
    axes: Axes,
    found: Sequence[SimulationFigures],
    name: str,
    curve_of: Callable[[SimulationFigures], Sequence[float]],
) -> None:
    """Draw the part of the complete requests that took no longer."""
    for label, one in list(zip(labels_of(found), found, strict=True))[:_MAX_CURVES]:
        if curve := curve_of(one):
            axes.plot(curve, np.linspace(0, 1, len(curve)), label=label if len(found) > 1 else None)
    axes.set(xlabel=name, ylabel="part of complete requests", ylim=(0, 1))
    if axes.lines:
        axes.set_xscale("log")


def _engines(axes: Axes, found: Sequence[SimulationFigures]) -> None:
    """Draw the engines that serve, by role, and those that start: a colour for each, a line style for a simulation."""
    for index, (label, one) in enumerate(list(zip(labels_of(found), found, strict=True))[:_MAX_CURVES]):
        times_s = [*(point.at_s for point in one.fleet), one.duration_s]
        rows = {role.value: [point.serving.of_role(role) for point in one.fleet] for role in PLANNED_ROLES}
        rows["starting"] = [point.num_starting for point in one.fleet]
        for colour, (name, counts) in zip(_COLOURS, rows.items(), strict=True):
            if any(counts):
                full_name = f"{label}: {name}" if len(found) > 1 else name
                style = _STYLES[index % len(_STYLES)]
                axes.step(times_s, [*counts, counts[-1]], style, where="post", color=colour, label=full_name)
    axes.set(xlabel="s", ylabel="engines")
    axes.set_ylim(bottom=0)


def _complete_per_s(one: SimulationFigures) -> float:
    num_complete = one.outcomes.get("complete", 0)
    return one.offered_per_s * num_complete / one.num_requests if one.num_requests else 0.0
