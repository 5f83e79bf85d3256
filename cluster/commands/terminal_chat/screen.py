"""The terminal output of a chat: an answer as it arrives, and a status line below it.

The cursor stays at the end of the answer. IND makes sure that there is a row below; DECSC and DECRC (save and restore
the cursor) let the status line be written there. So no widths have to be computed, and text may wrap and scroll.
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
    """Return a model's text with all control characters replaced, except newline and tab.

    Otherwise a terminal would obey escape sequences in the text.
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class Screen:
    """The output of a chat on a stream; the status line is shown only if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_line = False

    def show(self, text: str, line: str = "") -> None:
        """Append text to the answer, and replace the status line by line; an empty line removes it."""
        if not self._is_terminal:
            self._put(text)
            return
        before, after = self._erasure(), ""
        if line:
            width = shutil.get_terminal_size().columns - 1
            after = f"{_ROW_BELOW}{_SAVE}{_DOWN_AND_ERASE}{_DIM}{line[:width]}{_PLAIN}{_RESTORE}"
        self._has_line = bool(line)
        # One write for everything, so that the line does not flicker.
        self._put(before + harmless(text) + after)

    def end(self, line: str) -> None:
        """End the answer and leave a last status line below it."""
        self._put(f"{self._erasure()}\n{_DIM}{line}{_PLAIN}\n" if self._is_terminal else "\n")
        self._has_line = False

    def _erasure(self) -> str:
        return f"{_SAVE}{_DOWN_AND_ERASE}{_RESTORE}" if self._has_line else ""

    def _put(self, codes: str) -> None:
        self._stream.write(codes)
        self._stream.flush()
