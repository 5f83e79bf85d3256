"""Reading the user's input: with line editing and a history on a terminal, and with texts of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

_MAX_HISTORY: Final = 1000
_BLOCK: Final = '"""'


def default_history() -> Path:
    """Return the history's default path: below XDG_STATE_HOME, as the XDG base directory specification has it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "raypd" / "chat_history"


class Keyboard:
    """A reader of standard input, and the context manager that loads and saves the history.

    Only the user may read the history's file.
    """

    def __init__(self, history: Path | None) -> None:
        """history: the history's file; None keeps no history. Without a terminal none is kept either."""
        self._history = history if sys.stdin.isatty() else None

    def __enter__(self) -> Keyboard:
        if sys.stdin.isatty():
            import readline  # With this import, input() gets line editing.

            readline.set_auto_history(True)
            readline.set_history_length(_MAX_HISTORY)
            if self._history is not None:
                with contextlib.suppress(OSError):
                    readline.read_history_file(self._history)
        return self

    def __exit__(self, *_: object) -> None:
        if self._history is None:
            return
        import readline

        # A history that cannot be saved is no reason to end the chat with an error.
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)

    def read(self) -> str | None:
        """Return the next message or command; None at the end of the input. Raises KeyboardInterrupt on Ctrl-C."""
        try:
            line = input("> " if sys.stdin.isatty() else "")
            if line.startswith(_BLOCK):
                return self._read_block(line.removeprefix(_BLOCK))
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._read_more())
            return "\n".join(lines)
        except EOFError:
            return None

    def _read_block(self, line: str) -> str:
        lines = []
        while not line.endswith(_BLOCK):
            lines.append(line)
            line = self._read_more()
        return "\n".join([*lines, line.removesuffix(_BLOCK)]).strip("\n")

    @staticmethod
    def _read_more() -> str:
        return input(". " if sys.stdin.isatty() else "")
