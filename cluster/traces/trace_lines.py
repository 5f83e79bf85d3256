"""Reads the lines of a trace's file, one at a time, within bounds, and names file and line in every error."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from cluster.errors import InvalidConfig

MAX_LINE_BYTES: Final = 4 << 20
"""The longest line: the ids of the blocks of a prompt of 10^7 tokens take about a tenth of this."""
_SHOWN_CHARS: Final = 80


@contextmanager
def open_trace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a trace's file. Raises InvalidConfig if it is no file, or cannot be opened or read."""
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(path.stat().st_mode):
                raise bad_trace(path, "it is not a regular file: copy what it gives into one")
            yield file
    except OSError as error:
        raise bad_trace(path, f"it cannot be read: {error.strerror}") from error


def numbered_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, int, str]]:
    """Yield the number of each line that is not blank, from 1 on, the offset of its first byte, and its text.

    The text of a line that was written in full ends with a line feed; only the last line may lack it.
    Raises InvalidConfig for a line that is too long or that is not UTF-8.
    """
    number, offset = 0, 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise bad_line(path, number, f"it is longer than {MAX_LINE_BYTES} bytes: no request needs that many")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise bad_line(path, number, "it is not UTF-8") from error
        if text.strip():
            yield number, offset, text
        offset += len(line)


def shown(text: str) -> str:
    """Return the beginning of a line for an error."""
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def bad_trace(path: Path, mistake: str) -> InvalidConfig:
    """Make the error about a file."""
    return InvalidConfig(f"--trace {path}", [mistake])


def bad_line(path: Path, number: int, mistake: str) -> InvalidConfig:
    """Make the error about a line of a file. number: from 1 on"""
    return bad_trace(path, f"line {number}: {mistake}")
