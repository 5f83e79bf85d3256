"""Texts that draw numbers: a line of a history, a bar with its number inside, and the phases of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.text import Text

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_WARN: Final = 0.80
_ALARM: Final = 0.95

PHASE_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "queue": ("░", "yellow"),
    "prefill": ("█", "blue"),
    "transfer": ("▓", "red"),
    "decode": ("▒", "green"),
    "preempted": ("▚", "magenta"),
    "recovery": ("┅", "bright_red"),
    "unreported": ("·", "default"),
}
"""The character and the colour of each phase of a request."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last values as columns, the newest on the right; the highest one has the full height.

    A value of 0 is a blank, so that idle times differ from small values.
    """
    shown = values[-width:] if width > 0 else []
    most = max(shown, default=0.0)
    columns = "".join(
        " " if value <= 0 else _LEVELS[min(len(_LEVELS) - 1, math.ceil(value / most * len(_LEVELS)) - 1)]
        for value in shown
    )
    return columns.rjust(max(width, 0))


def filled_bar(share: float, width: int) -> Text:
    """Draw a share of 0 to 1 as a bar with the percentage in it; its colour warns from 80 % and alarms from 95 %."""
    share = min(1.0, max(0.0, share))
    label = f"{share:.0%}".center(width)
    num_filled = round(share * width)
    colour = "red" if share >= _ALARM else "yellow" if share >= _WARN else "green"
    bar = Text(label, style="default")
    bar.stylize(f"black on {colour}", 0, num_filled)
    bar.stylize("on grey23", num_filled, width)
    return bar


def phase_bar(phases: Iterable[tuple[str, float]], width: int) -> Text:
    """Draw the phases of a request, each in its colour, as wide as its share of all of them.

    phases: name, as in PHASE_STYLES, and seconds. A phase that took any time has one column at least, so that it is
    seen; the widest ones make room for it.
    """
    taken = [(name, seconds) for name, seconds in phases if seconds > 0]
    widths = _columns([seconds for _, seconds in taken], width)
    bar = Text()
    for (name, _), num in zip(taken, widths, strict=True):
        character, style = PHASE_STYLES.get(name, ("?", "default"))
        bar.append(character * num, style)
    return bar


def _columns(sizes: Sequence[float], width: int) -> list[int]:
    """Divide columns by sizes, at least one each as far as they go; their sum is width."""
    if not sizes or width < len(sizes):
        return [1] * width + [0] * (len(sizes) - width) if sizes else []
    total = sum(sizes)
    ends = [round(sum(sizes[: at + 1]) / total * width) for at in range(len(sizes))]
    widths = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    for at, num in enumerate(widths):
        if num == 0:
            widths[widths.index(max(widths))] -= 1
            widths[at] = 1
    return widths
