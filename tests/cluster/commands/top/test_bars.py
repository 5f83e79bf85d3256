from __future__ import annotations

import pytest

from cluster.commands.top.bars import filled_bar, phase_bar, sparkline


def test_a_line_has_its_newest_value_on_the_right_and_its_highest_at_full_height() -> None:
    assert sparkline([0.0, 1.0, 4.0, 8.0], 6) == "   ▁▄█"
    assert sparkline([8.0, 4.0, 8.0], 2) == "▄█", "the last ones"


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_a_line_of_nothing_is_blank(values: list[float]) -> None:
    assert sparkline(values, 3) == "   "


def test_a_line_without_room_is_empty() -> None:
    assert sparkline([1.0], 0) == ""


@pytest.mark.parametrize(("share", "label"), [(0.0, "    0%    "), (0.5, "   50%    "), (1.2, "   100%   ")])
def test_a_bar_has_its_number_in_it(share: float, label: str) -> None:
    bar = filled_bar(share, 10)
    assert bar.plain == label
    filled = [span for span in bar.spans if "black on" in str(span.style)]
    assert sum(span.end - span.start for span in filled) == round(min(share, 1.0) * 10)


@pytest.mark.parametrize(("share", "colour"), [(0.5, "green"), (0.8, "yellow"), (0.95, "red")])
def test_a_bar_warns_by_its_colour(share: float, colour: str) -> None:
    assert str(filled_bar(share, 10).spans[0].style) == f"black on {colour}"


def test_phases_are_as_wide_as_they_were_long() -> None:
    assert phase_bar([("queue", 1.0), ("prefill", 2.0), ("decode", 1.0)], 8).plain == "░░████▒▒"


def test_a_short_phase_is_seen() -> None:
    bar = phase_bar([("queue", 0.001), ("prefill", 10.0), ("transfer", 0.001), ("decode", 0.0)], 10)
    assert bar.plain == "░████████▓"


def test_phases_beyond_the_width_are_left_out() -> None:
    assert phase_bar([("queue", 1.0), ("prefill", 1.0), ("decode", 1.0)], 2).plain == "░█"
    assert phase_bar([], 5).plain == ""
