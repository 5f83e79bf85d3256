"""Draws plots as SVG within HTML: lines and dots over axes with ticks. The page's style gives the colours.

A series is drawn with the class s0, s1 and so on, the colours of the servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

MAX_POINTS: Final = 1500
"""The most points of a series that are drawn; of more, evenly spaced ones are."""
_WIDTH: Final = 560
_HEIGHT: Final = 300
_LEFT: Final = 62
_RIGHT: Final = 12
_TOP: Final = 12
_BOTTOM: Final = 44
"""The margins of a plot, in the units of its width."""
_NUM_TICKS: Final = 6


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. number: of the colour; label: for the legend and for readers of the screen"""

    label: str
    number: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.

    x_label, y_label: the axes' names with their units
    has_log_x: whether the x axis is logarithmic; points at 0 or below are left out then
    is_dots:   whether points are drawn as dots instead of a line through them
    y_max:     the end of the y axis; None: the largest value
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    has_log_x: bool = False
    is_dots: bool = False
    y_max: float | None = None


def svg_of(plot: Plot) -> str:
    """Return a plot as an svg element; a paragraph that says so if it has no points."""
    series = [(one, _drawn(one.points, has_log_x=plot.has_log_x)) for one in plot.series]
    points = [point for _, drawn in series for point in drawn]
    title = escape(plot.title)
    if not points:
        return f'<figure><figcaption>{title}</figcaption><p class="none">no values</p></figure>'
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _log_axis(min(xs), max(xs)) if plot.has_log_x else _linear_axis(min(0.0, *xs), max(xs))
    y_axis = _linear_axis(min(0.0, *ys), plot.y_max if plot.y_max is not None else max(ys))
    across = _scale(x_axis, _LEFT, _WIDTH - _RIGHT)
    up = _scale(y_axis, _HEIGHT - _BOTTOM, _TOP)
    opening = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
    parts = [f"<figure><figcaption>{title}</figcaption>", opening]
    parts += _axes(plot, x_axis, y_axis, across, up)
    draw = _dots if plot.is_dots else _line
    parts += [draw(one, drawn, across, up) for one, drawn in series if drawn]
    return "".join([*parts, "</svg></figure>"])


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis from low to high. is_log: whether equal distances are equal ratios"""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False


def _linear_axis(low: float, high: float) -> _Axis:
    span = high - low or 1.0
    exponent = math.floor(math.log10(span / _NUM_TICKS))
    step = next(size for base in (1, 2, 5, 10) if span / (size := base * 10.0**exponent) <= _NUM_TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return _Axis(first * step, last * step, [number * step for number in range(first, last + 1)])


def _log_axis(low: float, high: float) -> _Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last == first:
        last += 1
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last) for factor in factors]
    return _Axis(10.0**first, 10.0**last, [*ticks, 10.0**last], is_log=True)


def _scale(axis: _Axis, start: float, end: float) -> Callable[[float], float]:
    low, high = (math.log10(axis.low), math.log10(axis.high)) if axis.is_log else (axis.low, axis.high)

    def position(value: float) -> float:
        at = math.log10(value) if axis.is_log else value
        return start + (min(max(at, low), high) - low) / (high - low) * (end - start)

    return position


def _axes(
    plot: Plot, x_axis: _Axis, y_axis: _Axis, across: Callable[[float], float], up: Callable[[float], float]
) -> Iterable[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in x_axis.ticks:
        x = across(tick)
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick_text(tick)}</text>'
    for tick in y_axis.ticks:
        y = up(tick)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>'
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    yield f'<text x="{middle_x:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(plot.x_label)}</text>'
    yield (
        f'<text x="14" y="{middle_y:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle_y:.0f})">'
        f"{escape(plot.y_label)}</text>"
    )


def tick_text(value: float) -> str:
    """Return a short text of a tick's value."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def _drawn(points: Sequence[tuple[float, float]], *, has_log_x: bool) -> list[tuple[float, float]]:
    """Return the points that are drawn: finite ones, the first and the last one among them."""
    fit = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not has_log_x)]
    if len(fit) <= MAX_POINTS:
        return fit
    return [fit[round(number * (len(fit) - 1) / (MAX_POINTS - 1))] for number in range(MAX_POINTS)]


def _line(
    series: Series, drawn: Sequence[tuple[float, float]], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
    return f'<polyline class="s{series.number}" points="{path}"><title>{escape(series.label)}</title></polyline>'


def _dots(
    series: Series, drawn: Sequence[tuple[float, float]], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    # A line of no length with round ends is a dot, and all dots of a series are one element.
    path = "".join(f"M{across(x):.1f} {up(y):.1f}h0" for x, y in drawn)
    return f'<path class="dots s{series.number}" d="{path}"><title>{escape(series.label)}</title></path>'
