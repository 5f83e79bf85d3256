"""Reads what the user enters: with editing and history on a terminal, and over several lines if that is wanted."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

_MAX_HISTORY: Final = 1000
_BLOCK: Final = '"""'


def default_history() -> Path:
    """By the XDG base directory specification: where state of programs is kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "raypd" / "chat_history"


class Keyboard:
    """Reads standard input. A context manager, which keeps the history; the user alone may read it."""

    def __init__(self, history: Path | None) -> None:
        """history: its file; None keeps none."""
        self._history = history if sys.stdin.isatty() else None

    def __enter__(self) -> Keyboard:
        if sys.stdin.isatty():
            import readline  # input() edits its lines from here on.

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

        # A chat that cannot keep its history is a chat still.
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)

    def read(self) -> str | None:
        """The next thing that is said; None at the end of the input. Raises KeyboardInterrupt."""
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
