"""Reads single keys of a terminal as they are pressed, without waiting for Enter."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_NAMES: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "interrupt",
}


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys in what a terminal has sent at once: characters as they are, and the names of other keys.

    The names are up, down, escape, enter, backspace and interrupt; further sequences of control characters are left
    out.
    """
    rest = text
    while rest:
        sequence = next((one for one in _NAMES if len(one) > 1 and rest.startswith(one)), None)
        if sequence is None and len(rest) > 1 and rest[0] == "\x1b" and rest[1] in "[O":
            # A key without a name here: its sequence ends with the first letter or tilde.
            end = next((at for at, one in enumerate(rest[2:], 3) if one.isalpha() or one == "~"), len(rest))
            rest = rest[end:]
            continue
        sequence = sequence or rest[0]
        rest = rest[len(sequence) :]
        if sequence in _NAMES:
            yield _NAMES[sequence]
        elif sequence.isprintable():
            yield sequence


@contextmanager
def pressed_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call on_key on the running event loop for every key that is pressed on standard input, a terminal.

    Keys are not shown, and Ctrl-C is a key, until the context is left: then the terminal is as it was before.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in keys_in(decoder.decode(os.read(descriptor, 1024))):
            on_key(key)

    tty.setraw(descriptor, termios.TCSADRAIN)
    modes = termios.tcgetattr(descriptor)
    modes[1] = before[1]  # Output is processed as before, so that lines end with a carriage return.
    termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
