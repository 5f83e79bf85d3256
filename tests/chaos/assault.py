"""Carrying faults out, from outside: signals to processes, and connections cut."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import psutil

from cluster.api.protos.raypd.v1 import admin_pb2
from tests.chaos.cuts import cut_local_links, cut_tcp
from tests.chaos.faults import DEATHS, HEARTBEAT_TIMEOUT_S, Fault, FaultKind
from tests.chaos.processes import CONTROLLER, INGRESS, MarkedProcesses
from tests.chaos.reach import Reach
from tests.chaos.watch import StatusWatch
from tests.patience import CLUSTER_S

_BUSY_TIMEOUT_S: Final = 20.0
"""How long a fault waits for somebody whom it disturbs."""
_FENCED_TIMEOUT_S: Final = 60.0
_HIT_TIMEOUT_S: Final = 60.0
"""How long a fault waits for something that it can hit: what the fault before it has hit may be on its way in."""
_HIT_INTERVAL_S: Final = 0.2
_TAKEN_TIMEOUT_S: Final = 60.0
_NUM_FAILED_STARTS: Final = 2


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A fault that was carried out. Times are monotonic seconds.

    num_hit:     processes that got a signal, or connections that were cut; 0 if there was none
    engine_id:   of the engine that it hit, and incarnation, the life of it; empty and 0 if it was none of an engine's
    request_ids: of requests that were on this engine then
    """

    fault: Fault
    at_s: float
    num_hit: int
    engine_id: str = ""
    incarnation: int = 0
    request_ids: frozenset[str] = frozenset()


class Assault:
    """Carries out one fault after the other."""

    def __init__(
        self, processes: MarkedProcesses, reach: Reach, watch: StatusWatch, say: Callable[[str], None]
    ) -> None:
        """say: is told of every fault, in words."""
        self._processes = processes
        self._reach = reach
        self._watch = watch
        self._say = say
        self._started_s = time.monotonic()
        self.records: list[FaultRecord] = []

    async def carry_out(self, fault: Fault) -> None:
        """Returns when the fault is over, not when the cluster has got over it. Raises AssertionError."""
        await asyncio.sleep(fault.delay_s)
        end_s, record = time.monotonic() + _HIT_TIMEOUT_S, await self._try(fault)
        while not record.num_hit and time.monotonic() < end_s:
            await asyncio.sleep(_HIT_INTERVAL_S)
            record = await self._try(fault)
        self.records.append(record)
        whom = f" of {record.engine_id}, incarnation {record.incarnation}" if record.engine_id else ""
        what = f"{fault.kind}{whom}" if record.num_hit else f"{fault.kind}: found nothing to hit"
        self._say(f"{record.at_s - self._started_s:6.1f} s  {what}")

    async def _try(self, fault: Fault) -> FaultRecord:
        if fault.needs_calm or self._watch.latest is None:
            await self._watch.until_calm(CLUSTER_S)
        return await (self._hit_an_engine(fault) if fault.engine_id else self._hit_another(fault))

    async def _hit_another(self, fault: Fault) -> FaultRecord:
        match fault.kind:
            case FaultKind.STEP_CLOCK:
                self._reach.step_clock(fault.step_s)
                return FaultRecord(fault, time.monotonic(), 1)
            case FaultKind.BUSY_INGRESS:
                return await self._keep_ingresses_busy(fault)
            case FaultKind.KILL_UNSTARTABLE_INGRESS:
                self._reach.fail_ingresses(_NUM_FAILED_STARTS)
                record = await self._kill(fault)
                await self._watch.until_calm(CLUSTER_S)
                assert not self._reach.num_ingresses_to_fail, "an ingress is there that Ray could not have started"
                return record
            case _:
                return await self._kill(fault)

    async def _keep_ingresses_busy(self, fault: Fault) -> FaultRecord:
        """An ingress whose event loop is busy is no dead one: its process has to be the same afterwards."""
        busy, at_s = await asyncio.to_thread(self._processes.titled, INGRESS), time.monotonic()
        for process in busy:
            self._reach.keep_busy(process.pid, fault.stopped_s)
        await self._until_taken([process.pid for process in busy])
        await asyncio.sleep(fault.stopped_s + 1.0)
        await self._watch.until_calm(CLUSTER_S)
        given_up = [process.pid for process in busy if not process.is_running()]
        assert not given_up, f"an ingress was ended because its event loop was busy: {given_up}"
        return FaultRecord(fault, at_s, len(busy))

    async def _until_taken(self, pids: list[int]) -> None:
        end_s = time.monotonic() + _TAKEN_TIMEOUT_S
        while not_taken := [pid for pid in pids if not self._reach.is_taken(pid)]:
            assert time.monotonic() < end_s, f"these ingresses did not do as they were told: {not_taken}"
            await asyncio.sleep(_HIT_INTERVAL_S)

    async def _kill(self, fault: Fault) -> FaultRecord:
        title = CONTROLLER if fault.kind is FaultKind.KILL_CONTROLLER else INGRESS
        victims = await asyncio.to_thread(self._processes.titled, title)
        at_s = time.monotonic()
        for victim in victims:
            victim.kill()
        return FaultRecord(fault, at_s, len(victims))

    async def _hit_an_engine(self, fault: Fault) -> FaultRecord:
        """The one that is meant; if it has nothing to hit and any other will do, the next one that has."""
        engine_ids = self._watch.engine_ids
        start = engine_ids.index(fault.engine_id)
        for engine_id in engine_ids[start:] + engine_ids[:start]:
            record = await self._hit_engine(fault, engine_id)
            if record.num_hit or fault.needs_calm:
                break
        return record

    async def _hit_engine(self, fault: Fault, engine_id: str) -> FaultRecord:
        try:
            engine = self._watch.engine(engine_id)
            process = await asyncio.to_thread(self._processes.engine_at, engine.address)
        except LookupError:
            return FaultRecord(fault, time.monotonic(), 0)  # It is on its way out, or on its way in.
        if engine_id.startswith("decode"):
            await self._watch.until_busy(engine_id, _BUSY_TIMEOUT_S)
        at_s, request_ids = time.monotonic(), self._watch.requests_on(engine_id)
        num_hit = await self._hit(fault, engine, process)
        return FaultRecord(fault, at_s, num_hit, engine_id, engine.incarnation, request_ids)

    async def _hit(self, fault: Fault, engine: admin_pb2.EngineStatus, process: psutil.Process) -> int:
        if fault.kind in DEATHS:
            self._watch.expect_new_incarnation(engine.engine_id, engine.incarnation)
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
                return await asyncio.to_thread(self._cut, fault, process, engine)

    async def _stop_until_replaced(self, engine_id: str, incarnation: int, process: psutil.Process) -> None:
        """The old life has to end by itself when it can go on: it is fenced, and has no place any more."""
        with _stopped(process):
            timeout_s = 3 * HEARTBEAT_TIMEOUT_S + CLUSTER_S
            await self._watch.until_incarnation(engine_id, incarnation + 1, timeout_s)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [process], _FENCED_TIMEOUT_S)
        assert not alive, f"{engine_id}, incarnation {incarnation}, was replaced, but its process {process.pid} runs on"

    def _cut(self, fault: Fault, process: psutil.Process, engine: admin_pb2.EngineStatus) -> int:
        port = _port(engine.address)
        if fault.kind is FaultKind.CUT_SESSION:
            return sum(cut_tcp(ingress, port) for ingress in self._processes.titled(INGRESS))
        if fault.kind is FaultKind.CUT_DATA:
            return cut_local_links(process)
        num_cut = 0
        for other_port, other in self._others(engine.engine_id):
            num_cut += cut_tcp(other, port) + cut_tcp(process, other_port)
        return num_cut

    def _others(self, engine_id: str) -> Iterator[tuple[int, psutil.Process]]:
        """Port and process of every other engine that is there."""
        for other in self._watch.engine_ids:
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                address = self._watch.engine(other).address
                process = self._processes.engine_at(address)
                if other != engine_id:
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
