"""An answer on a terminal, with a line below it."""

from __future__ import annotations

import io

import pytest

from cluster.commands.terminal_chat.screen import Screen, harmless


class Terminal(io.StringIO):
    """A terminal of any size that shows what IND, CUU, CUD, DECSC, DECRC and EL do; rows begin at 0."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        cells: dict[tuple[int, int], str] = {}
        row, column, saved, text = 0, 0, (0, 0), self.getvalue()
        while text:
            for code in ("\x1bD", "\x1b[A", "\x1b[B", "\x1b[2K", "\x1b7", "\x1b8", "\x1b[2m", "\x1b[0m"):
                if text.startswith(code):
                    break
            else:
                code = text[0]
            text = text.removeprefix(code)
            match code:
                case "\x1bD" | "\x1b[B":
                    row += 1
                case "\x1b[A":
                    row -= 1
                case "\x1b[2K":
                    cells = {place: cell for place, cell in cells.items() if place[0] != row}
                case "\x1b7":
                    saved = (row, column)
                case "\x1b8":
                    row, column = saved
                case "\n":
                    row, column = row + 1, 0
                case "\r":
                    column = 0
                case "\x1b[2m" | "\x1b[0m":
                    pass
                case _:
                    cells[row, column] = code
                    column += 1
        height = max((place[0] for place in cells), default=-1) + 1
        width = max((place[1] for place in cells), default=-1) + 1
        return ["".join(cells.get((r, c), " ") for c in range(width)).rstrip() for r in range(height)]


def test_the_line_stays_below_the_text_and_is_gone_in_the_end() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.show("one", "figures 1")
    assert terminal.rows() == ["one", "figures 1"]
    screen.show(" two\nthree", "figures 2")
    assert terminal.rows() == ["one two", "three", "figures 2"]
    screen.show(" four", "fig 3")
    assert terminal.rows() == ["one two", "three four", "fig 3"]
    screen.show(" five")
    assert terminal.rows() == ["one two", "three four five"]
    screen.show("", "fig 4")
    screen.end("the end")
    assert terminal.rows() == ["one two", "three four five", "the end"]


def test_a_line_is_cut_to_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "6")
    terminal = Terminal()
    Screen(terminal).show("", "figures")
    assert terminal.rows() == ["", "figur"]


def test_a_terminal_obeys_nothing_that_a_model_says() -> None:
    terminal = Terminal()
    Screen(terminal).show("a\x1b]0;title\x07\tb\r\nc\x9b2J")
    assert terminal.getvalue() == "a�]0;title�\tb�\nc�2J"
    assert harmless("é 漢 😀\n\t") == "é 漢 😀\n\t"


def test_a_file_gets_the_text_as_it_is_and_nothing_else() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.show("a\x1bb", "figures")
    screen.end("the end")
    assert stream.getvalue() == "a\x1bb\n"
