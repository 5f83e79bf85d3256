"""Carrying faults out, from outside: signals to processes, and connections cut."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil

from cluster.ingress.protos.raypd.v1 import admin_pb2
from tests.chaos.cuts import cut_local_links, cut_tcp
from tests.chaos.faults import DEATHS, ENGINE_IDS, HEARTBEAT_TIMEOUT_S, Fault, FaultKind
from tests.chaos.processes import CONTROLLER, INGRESS, MarkedProcesses
from tests.chaos.watch import StatusWatch

_CALM_TIMEOUT_S: Final = 90.0
_BUSY_TIMEOUT_S: Final = 3.0
"""How long a fault waits for somebody whom it disturbs."""
_FENCED_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A fault that was carried out. Times are monotonic seconds.

    num_hit:     processes that got a signal, or connections that were cut; 0 if there was none
    incarnation: the life of the engine that it hit; 0 if it was none of an engine's
    request_ids: of requests that were on this engine then
    """

    fault: Fault
    at_s: float
    num_hit: int
    incarnation: int = 0
    request_ids: frozenset[str] = frozenset()


class Assault:
    """Carries out one fault after the other."""

    def __init__(self, processes: MarkedProcesses, watch: StatusWatch) -> None:
        self._processes = processes
        self._watch = watch
        self.records: list[FaultRecord] = []

    async def carry_out(self, fault: Fault) -> None:
        """Returns when the fault is over, not when the cluster has got over it. Raises AssertionError."""
        await asyncio.sleep(fault.delay_s)
        if fault.needs_calm or self._watch.latest is None:
            await self._watch.until_calm(_CALM_TIMEOUT_S)
        if fault.engine_id:
            await self._hit_engine(fault)
            return
        title = CONTROLLER if fault.kind is FaultKind.KILL_CONTROLLER else INGRESS
        victims = await asyncio.to_thread(self._processes.titled, title)
        self.records.append(FaultRecord(fault, time.monotonic(), len(victims)))
        for victim in victims:
            victim.kill()

    async def _hit_engine(self, fault: Fault) -> None:
        engine = self._watch.engine(fault.engine_id)
        try:
            process = await asyncio.to_thread(self._processes.engine_at, engine.address)
        except LookupError:
            # It is on its way out, or on its way in.
            self.records.append(FaultRecord(fault, time.monotonic(), 0, engine.incarnation))
            return
        if fault.engine_id.startswith("decode"):
            await self._watch.until_busy(fault.engine_id, _BUSY_TIMEOUT_S)
        at_s, request_ids = time.monotonic(), self._watch.requests_on(fault.engine_id)
        num_hit = await self._hit(fault, engine, process)
        self.records.append(FaultRecord(fault, at_s, num_hit, engine.incarnation, request_ids))

    async def _hit(self, fault: Fault, engine: admin_pb2.EngineStatus, process: psutil.Process) -> int:
        if fault.kind in DEATHS:
            self._watch.expect_new_life(engine.engine_id, engine.incarnation)
        match fault.kind:
            case FaultKind.KILL_PREFILL | FaultKind.KILL_DECODE:
                process.kill()
                return 1
            case FaultKind.SHORT_STOP | FaultKind.LONG_STOP:
                with _stopped(process):
                    await asyncio.sleep(fault.stopped_s)
                return 1
            case FaultKind.STOP_UNTIL_REPLACED:
                await self._stop_until_replaced(engine.engine_id, engine.incarnation, process)
                return 1
            case _:
                return await asyncio.to_thread(self._cut, fault, process, engine.address)

    async def _stop_until_replaced(self, engine_id: str, incarnation: int, process: psutil.Process) -> None:
        """The old life has to end by itself when it can go on: it is fenced, and has no place any more."""
        with _stopped(process):
            timeout_s = 3 * HEARTBEAT_TIMEOUT_S + _CALM_TIMEOUT_S
            await self._watch.until_incarnation(engine_id, incarnation + 1, timeout_s)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [process], _FENCED_TIMEOUT_S)
        assert not alive, f"{engine_id}, incarnation {incarnation}, was replaced, but its process {process.pid} runs on"

    def _cut(self, fault: Fault, process: psutil.Process, address: str) -> int:
        if fault.kind is FaultKind.CUT_SESSION:
            return sum(cut_tcp(ingress, _port(address)) for ingress in self._processes.titled(INGRESS))
        if fault.kind is FaultKind.CUT_CONTROL:
            return self._cut_control(fault.engine_id, process, _port(address))
        return self._cut_data(fault.engine_id)

    def _cut_control(self, engine_id: str, process: psutil.Process, port: int) -> int:
        num_cut = 0
        for other, peer in self._engines_from(engine_id):
            num_cut += cut_tcp(peer, port)
            num_cut += cut_tcp(process, other)
        return num_cut

    def _cut_data(self, engine_id: str) -> int:
        """Of the first engine, from this one on, that sends to anybody."""
        for _, process in self._engines_from(engine_id):
            if num_cut := cut_local_links(process):
                return num_cut
        return 0

    def _engines_from(self, engine_id: str) -> Iterator[tuple[int, psutil.Process]]:
        """Port and process of every engine that is there, beginning with this one."""
        start = ENGINE_IDS.index(engine_id)
        for other in ENGINE_IDS[start:] + ENGINE_IDS[:start]:
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                address = self._watch.engine(other).address
                process = self._processes.engine_at(address)
                yield _port(address), process


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
