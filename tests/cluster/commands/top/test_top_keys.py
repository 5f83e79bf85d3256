from __future__ import annotations

import asyncio
import os
import pty
import sys
import termios
from typing import IO

import pytest

from cluster.commands.top.top_keys import keys_in, pressed_keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("d", ["d"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b", ["escape"]),
        ("\r\x7f\x03", ["enter", "backspace", "interrupt"]),
        ("\x1b[5~y", ["y"]),
        ("\x1b[1;5Cq", ["q"]),
        ("ä\x00", ["ä"]),
        ("", []),
    ],
)
def test_keys_are_named(text: str, keys: list[str]) -> None:
    assert list(keys_in(text)) == keys


async def test_keys_come_one_by_one_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    keys: asyncio.Queue[str] = asyncio.Queue()
    stdin: IO[str]
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(terminal)
        with pressed_keys(keys.put_nowait):
            assert not termios.tcgetattr(terminal)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
            assert termios.tcgetattr(terminal)[1] & termios.OPOST
            os.write(controller, "jä\x03".encode())
            assert [await asyncio.wait_for(keys.get(), 60) for _ in range(3)] == ["j", "ä", "interrupt"]
        assert termios.tcgetattr(terminal) == before
    os.close(controller)
