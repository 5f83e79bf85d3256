from __future__ import annotations

import math
import re

import pytest

from cluster.bench.page.svg_plots import MAX_POINTS, Plot, Series, svg_of, tick_text


def _plot(*points: tuple[float, float], **fields: bool) -> str:
    return svg_of(Plot("t", "x", "y", [Series("A", 0, points)], **fields))


def _points(svg: str) -> list[tuple[float, float]]:
    [text] = re.findall(r'points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]


def test_points_are_between_the_axes_with_zero_at_the_bottom_left() -> None:
    svg = _plot((0.0, 0.0), (5.0, 10.0), (10.0, 5.0))
    assert _points(svg) == [(62.0, 256.0), (305.0, 12.0), (548.0, 134.0)]
    assert re.findall(r'text-anchor="middle">([0-9.]+)<', svg) == ["0", "2", "4", "6", "8", "10"]


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis() -> None:
    (a, _), (b, _), (c, _) = _points(_plot((0.01, 1.0), (0.1, 1.0), (1.0, 1.0), has_log_x=True))
    assert a == 62.0
    assert b - a == pytest.approx(c - b)


def test_values_that_no_axis_has_are_left_out() -> None:
    svg = _plot((math.nan, 1.0), (1.0, math.inf), (0.0, 1.0), (2.0, 1.0), has_log_x=True)
    assert len(_points(svg)) == 1


def test_a_plot_without_values_says_so() -> None:
    assert "no values" in _plot()


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(3.0, 3.0), (3.0, 3.0)], [(1e-9, 1e9)]])
@pytest.mark.parametrize("has_log_x", [False, True])
def test_axes_have_a_length_whatever_the_values_are(points: list[tuple[float, float]], has_log_x: bool) -> None:
    assert "nan" not in _plot(*points, has_log_x=has_log_x)


def test_many_points_are_thinned_out_and_both_ends_stay() -> None:
    points = _points(_plot(*((float(x), 0.0) for x in range(10 * MAX_POINTS + 1))))
    assert (len(points), points[0][0], points[-1][0]) == (MAX_POINTS, 62.0, 548.0)


def test_texts_are_escaped() -> None:
    svg = svg_of(Plot("<t>", '"x"', "&", [Series("<a>", 1, [(1.0, 1.0)])], is_dots=True))
    assert "<t>" not in svg
    assert "<a>" not in svg
    assert 'class="dots s1"' in svg


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.30000000000000004, "0.3"), (20_000, "20k"), (150, "150")])
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text
