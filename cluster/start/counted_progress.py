"""Draws a progress bar for what a start counts, such as the CUDA graphs that an engine captures."""

from __future__ import annotations

import re
from typing import Final

from rich.progress_bar import ProgressBar
from rich.table import Table

_COUNTED: Final = re.compile(r".*, (?P<begun>\d+) of (?P<total>\d+)( .*)?")
_BAR_WIDTH: Final = 30


def progress_bar_of(event: str) -> Table | None:
    """Return a bar and the event in one line if the event ends with a count, such as "…, 3 of 35 sizes"; else None.

    The step that is counted last has only begun, so it is not part of the bar.
    """
    if (found := _COUNTED.fullmatch(event)) is None:
        return None
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=int(found["total"]), completed=int(found["begun"]) - 1, width=_BAR_WIDTH)
    line.add_row(bar, event)
    return line
