"""A program on a pseudo terminal, as somebody who types at it."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_TIMEOUT_S = 60.0

_BELOW = re.compile(r"\x1b7(.*?)\x1b8", re.DOTALL)
_CODES = re.compile(r"\x1bD|\x1b\[[0-9;?]*[A-Za-z]")

_CTRL_C = "\x03"
CTRL_D, UP = "\x04", "\x1b[A"


class RaypdInTerminal:
    """`raypd` with these arguments; its home directory is one of the test's."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        # The terminal is the one that controls the program, so that Ctrl-C is a signal: a session's leader opens it.
        command = shlex.join([sys.executable, "-m", "cluster", *arguments])
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command} <>{os.ttyname(theirs)} >&0 2>&1"],
            env=os.environ | {"HOME": str(home), "XDG_STATE_HOME": str(home), "TERM": "xterm"},
            start_new_session=True,
        )
        # Ours can be read only while somebody has the other end open: before the program has, and after.
        self._theirs = theirs
        self._codes = ""
        self.shown = ""
        self.below: list[str] = []
        """The texts that the line below has shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._ours, keys.encode())

    def press_ctrl_c(self) -> None:
        """Once the program waits for something.

        Python's input() looks for signals only when one ends its wait for keys. One that comes while a key is still
        dealt with counts with the next key; no human is that fast.
        """
        process = psutil.Process(self._process.pid)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline_s, f"it is busy, and shows {self.shown!r}"
            time.sleep(0.001)
        self.type(_CTRL_C)

    def wait_for(self, text: str) -> str:
        """Wait for a text; returns what is shown from where the last wait ended to the end of this text."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise AssertionError(f"{text!r} was not shown, but {self.shown!r}")
            self._take(os.read(self._ours, 65536).decode(errors="replace"))
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def _take(self, codes: str) -> None:
        self._codes += codes
        self.below += [_CODES.sub("", line) for line in _BELOW.findall(self._codes)]
        text = _CODES.sub("", _BELOW.sub("", self._codes))
        # What is not complete yet stays for the next time.
        text, escape, rest = text.partition("\x1b")
        self.shown += text
        self._codes = escape + rest

    def wait_for_end(self) -> int:
        """The exit status."""
        return self._process.wait(_TIMEOUT_S)
