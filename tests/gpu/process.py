"""An object in a process of its own: calls go over a pipe, one at a time, each with a deadline.

Whatever CUDA or NCCL does there, a hang included, the test's process goes on and can kill it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CALL_TIMEOUT_S = 60.0


class CallFailed(AssertionError):
    """The call raised; the text is the other side's traceback."""


class Process:
    """Arguments and results are pickled; so the factory and what it makes are classes of modules."""

    def __init__(self, environment: dict[str, str], factory: Callable[..., object], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, environment, factory, arguments), daemon=True)
        self._process.start()
        far.close()
        self._take_answer("the constructor", 2 * CALL_TIMEOUT_S)

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of the object and wait for its result."""
        self._pipe.send((method, arguments))
        return self._take_answer(method, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(CALL_TIMEOUT_S)

    def _take_answer(self, what: str, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"{what}: no answer within {timeout_s:g} s"
        is_fine, answer = self._pipe.recv()
        if not is_fine:
            raise CallFailed(f"{what}:\n{answer}")
        return answer


def _serve(
    pipe: Connection, environment: dict[str, str], factory: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    # NCCL reads its environment at its first use.
    os.environ.update(environment)
    served = _answer(pipe, lambda: factory(*arguments), has_result=False)
    while served is not None:
        try:
            method, call_arguments = pipe.recv()
        except EOFError:
            break
        _answer(pipe, lambda: getattr(served, method)(*call_arguments))  # noqa: B023  # called at once


def _answer(pipe: Connection, call: Callable[[], Any], *, has_result: bool = True) -> Any:
    try:
        result = call()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return None
    pipe.send((True, result if has_result else None))
    return result
