"""A table that fits narrow terminals, and the texts in its cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
"""The number of blanks between columns."""


class WideTable:
    """A table that splits its columns into several tables below each other if the screen is too narrow.

    Each of them begins with the first column. Columns whose names begin with a blank hold text, on the left; the others
    hold numbers, on the right. Text in the last column may wrap.
    """

    def __init__(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._title = title
        self._columns = list(columns)
        self._rows = [[str(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        for number, columns in enumerate(self._split(options.max_width)):
            yield self._part(columns, self._title if number == 0 else None)

    def _split(self, width: int) -> list[list[int]]:
        """Return the indexes of the columns of each table. width: the screen's, in characters"""
        widths = [
            _GAP + max(len(cell.strip()) for cell in (name, *(row[index] for row in self._rows)))
            for index, name in enumerate(self._columns)
        ]
        if self._columns[-1].startswith(" "):
            widths[-1] = min(widths[-1], max(width // 4, len(self._columns[-1])))
        parts, left = [[0]], width - widths[0]
        for index in range(1, len(widths)):
            if widths[index] > left and len(parts[-1]) > 1:
                parts.append([0])
                left = width - widths[0]
            parts[-1].append(index)
            left -= widths[index]
        return parts

    def _part(self, columns: Sequence[int], title: str | None) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index in columns:
            name = self._columns[index]
            is_text = name.startswith(" ")
            may_wrap = is_text and index == len(self._columns) - 1
            justify: Literal["left", "right"] = "left" if is_text else "right"
            table.add_column(name.strip(), justify=justify, no_wrap=not may_wrap, overflow="fold")
        for row in self._rows:
            # Not as markup: some cells hold what clients chose, such as the ids of requests.
            table.add_row(*(Text(row[index]) for index in columns))
        return table


def age(seconds: float) -> str:
    """Return a time span in the unit that suits it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
