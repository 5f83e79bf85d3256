"""An engine in a process of its own, as the test holds it: calls over a pipe, one at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, Final

from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from tests.faults.engine_child import EngineChild, EngineSpec
from tests.faults.fault_points import Fault
from tests.fork_server import fork_server

_TIMEOUT_S: Final = 60.0
GAUGES: Final = frozenset(
    {
        "num_running_reqs",
        "num_waiting_reqs",
        "num_waiting_for_remote_kvs",
        "num_held_reqs",
        "num_blocks",
        "num_free_blocks",
        "num_links",
        "num_active_transfers",
    }
)
"""Counters that say how it is now; the others are totals."""


class CallFailed(AssertionError):
    """The call raised; the text is the other side's traceback."""


class EngineProcess:
    """Started on construction. A fork server has the libraries loaded, so a start takes a fraction of a second."""

    def __init__(self, spec: EngineSpec, role: EngineRole) -> None:
        self.spec = spec
        self.role = role
        context = fork_server()
        self._pipe, far_pipe = context.Pipe()
        self._fired, far_fired = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(far_pipe, far_fired, spec), daemon=True)
        self._process.start()
        far_pipe.close()
        far_fired.close()
        self._is_asked = True
        self._take_answer("the start")
        self.address = str(self.call("address"))
        self._counters_before: dict[str, int] = {}

    @property
    def descriptor(self) -> EngineDescriptor:
        """The descriptor that a session needs."""
        return EngineDescriptor(self.spec.engine_id, self.spec.incarnation, self.role, self.address)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the EngineChild and wait for its result. Raises CallFailed."""
        self._is_asked = True
        self._pipe.send((method, arguments))
        return self._take_answer(method)

    def arm(self, fault: Fault) -> None:
        """Let a fault happen next."""
        self.call("arm", fault)

    async def wait_fired(self) -> Fault:
        """Wait until the armed fault happens; may be cancelled."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fired.fileno(), has_come.set)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await has_come.wait()
        finally:
            loop.remove_reader(self._fired.fileno())
        fault = self._fired.recv()
        assert isinstance(fault, Fault)
        return fault

    async def wait_for(self, **expected: int) -> None:
        """Wait until the engine's counters are so. Totals count from this test's beginning."""
        absolute = {name: self._counters_before.get(name, 0) + count for name, count in expected.items()}
        await asyncio.to_thread(self.call, "wait_for", absolute)

    async def wait_until_whole(self) -> None:
        """Wait until nothing is left of any request, and check the engine's integrity."""
        await asyncio.to_thread(self.call, "wait_until_whole")

    def count(self, name: str) -> int:
        """A counter of the engine's, or its transfers', from this test's beginning."""
        return int(self.call("counters")[name]) - self._counters_before.get(name, 0)

    def begin_test(self) -> bool:
        """Make it ready for another test; False if it is not good for any more."""
        if not self.is_alive or self._is_asked:
            return False
        self.signal(signal.SIGCONT)
        try:
            self.call("disarm")
            self.call("release")
            self.call("wait_until_whole", 1.0)
            counters = self.call("counters")
        except (CallFailed, EOFError, OSError):
            return False
        self._counters_before = {name: count for name, count in counters.items() if name not in GAUGES}
        while self._fired.poll():
            self._fired.recv()
        return True

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def wait_dead(self) -> None:
        """Wait until the process is gone."""
        await asyncio.to_thread(self._process.join, _TIMEOUT_S)
        assert not self.is_alive

    def end(self) -> None:
        """Kill it, if it lives, and let everything go."""
        self._process.kill()
        self._process.join(_TIMEOUT_S)
        self._process.close()
        self._pipe.close()
        self._fired.close()

    def _take_answer(self, what: str) -> Any:
        assert self._pipe.poll(_TIMEOUT_S + 10.0), f"{what}: no answer"
        is_fine, answer = self._pipe.recv()
        self._is_asked = False
        if not is_fine:
            raise CallFailed(f"{self.spec.engine_id}, {what}:\n{answer}")
        return answer


def _serve(pipe: Connection, fired: Connection, spec: EngineSpec) -> None:
    child = _answer(pipe, lambda: EngineChild(fired, spec), has_result=False)
    while child is not None:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        _answer(pipe, lambda: getattr(child, method)(*arguments))  # noqa: B023  # called at once
    # The engine's threads are in the middle of something; nothing here is worth an orderly end.
    os._exit(0)


def _answer(pipe: Connection, call: Any, *, has_result: bool = True) -> Any:
    try:
        result = call()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return None
    pipe.send((True, result if has_result else None))
    return result
