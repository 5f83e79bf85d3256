"""How much CPU time the callbacks of an event loop use, each by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

_INTERVAL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class CallbackReport:
    """A callback, and the CPU time that it has used.

    lag_s: by how much the loop was late at most, time that the process waited for a core included
    """

    cpu_s: float
    name: str
    lag_s: float = 0.0


class CallbackTimes:
    """The callback that has used the most CPU time of its thread since the last report, garbage collection included.

    CPU time, and not time on the wall: a busy machine must not count as a slow callback.
    """

    def __init__(self) -> None:
        self._worst = CallbackReport(0.0, "")
        self._lag_s = 0.0

    def report(self) -> CallbackReport:
        """The worst one, which is forgotten."""
        worst, self._worst = self._worst, CallbackReport(0.0, "")
        lag_s, self._lag_s = self._lag_s, 0.0
        return replace(worst, lag_s=lag_s)

    def install(self) -> None:
        """Measure every callback of this process's event loops from now on."""
        run: Callable[[Any], None] = asyncio.Handle._run

        def run_timed(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s
            if took_s > self._worst.cpu_s:
                self._worst = CallbackReport(took_s, _name(handle._callback))

        asyncio.Handle._run = run_timed  # type: ignore[assignment, method-assign]  # that is the measurement
        self._wait(asyncio.get_running_loop())

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + _INTERVAL_S

        def measure() -> None:
            self._lag_s = max(self._lag_s, loop.time() - due_s)
            self._wait(loop)

        loop.call_at(due_s, measure)


def _name(callback: Any) -> str:
    """Return the name that people know a callback by: for a task, its coroutine's."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", callback))
