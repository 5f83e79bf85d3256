"""A terminal that shows an answer as it comes, and below it a line about it.

The line is where the cursor is not: IND makes sure that there is a row below, DECSC and DECRC bring the cursor back.
So neither the answer's width nor the terminal's is counted, and text may wrap and scroll as it likes.
"""

from __future__ import annotations

import re
import shutil
from typing import Final, TextIO

_ROW_BELOW: Final = "\x1bD\x1b[A"
_SAVE: Final = "\x1b7"
_RESTORE: Final = "\x1b8"
_DOWN_AND_ERASE: Final = "\x1b[B\r\x1b[2K"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Text of a model without what a terminal obeys: escape sequences and control characters but newline and tab."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class Screen:
    """Writes to a stream; the line below is only there if that is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_line = False

    def show(self, text: str, line: str = "") -> None:
        """Go on with the answer, and show this line below it from now on."""
        if not self._is_terminal:
            self._put(text)
            return
        before, after = self._erasure(), ""
        if line:
            width = shutil.get_terminal_size().columns - 1
            after = f"{_ROW_BELOW}{_SAVE}{_DOWN_AND_ERASE}{_DIM}{line[:width]}{_PLAIN}{_RESTORE}"
        self._has_line = bool(line)
        # At once, so that nothing flickers.
        self._put(before + harmless(text) + after)

    def end(self, line: str) -> None:
        """The answer is over: leave this under it."""
        self._put(f"{self._erasure()}\n{_DIM}{line}{_PLAIN}\n" if self._is_terminal else "\n")
        self._has_line = False

    def _erasure(self) -> str:
        return f"{_SAVE}{_DOWN_AND_ERASE}{_RESTORE}" if self._has_line else ""

    def _put(self, codes: str) -> None:
        self._stream.write(codes)
        self._stream.flush()
