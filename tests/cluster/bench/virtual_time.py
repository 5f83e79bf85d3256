"""An event loop whose time jumps to the next timer as soon as nothing else is to be done. For tests without sockets."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

_ResultT = TypeVar("_ResultT")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the time that it was to wait for has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for something that never comes"
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Its time stands still while something runs, unless that calls pass_time()."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def pass_time(self, seconds: float) -> None:
        """Be busy for so long."""
        self._virtual.now_s += seconds


def run_in_virtual_time(work: Coroutine[None, None, _ResultT]) -> _ResultT:
    """Run a coroutine. Its time begins at 0; asyncio.sleep(3) takes exactly 3 seconds of it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
