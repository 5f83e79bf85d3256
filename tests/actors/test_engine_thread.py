"""When the thread that steps an engine says that nothing is to be done."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast
from uuid import uuid4

import pytest

from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.engine_core import EngineCore, StepResult
from actors.engine_thread import EngineThread
from actors.process.cpu_binding import ComputeThreads, CpuBinding, CpuShare, HostCpus, decide_binding

_TIMEOUT_S = 60.0


class FakeCore:
    """Steps that take no time, and as many requests as a test says."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_steps = 0
        self.may_step = threading.Event()
        self.may_step.set()

    def step(self) -> StepResult:
        assert self.may_step.wait(_TIMEOUT_S)
        self.num_steps += 1
        return StepResult({}, is_idle=not self.num_requests)

    def make_stats(self) -> SchedulerStats:
        return SchedulerStats(num_running_reqs=self.num_requests, load_report=LoadReport(self.num_steps))

    def num_taken_by_client(self) -> dict[int, int]:
        return {3: self.num_requests}

    @property
    def num_taken_from_all(self) -> int:
        return self.num_requests

    def seconds_to_next_deadline(self) -> None:
        return None

    def shutdown(self) -> None:
        pass


def wait_until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def thread(core: FakeCore) -> Iterator[EngineThread]:
    thread = EngineThread(cast(EngineCore, core), lambda outputs: None, lambda error: None, threading.Event())
    thread.start()
    yield thread
    thread.stop()


def test_a_request_is_seen_from_its_submission_on_though_counters_are_older(
    core: FakeCore, thread: EngineThread
) -> None:
    for _ in range(3):
        wait_until(lambda: thread.is_idle)
        core.may_step.clear()
        core.num_requests = 1
        thread.wake()
        assert not thread.is_idle, "before its first step"
        num_steps = core.num_steps
        core.may_step.set()
        while core.num_steps < num_steps + 1000:
            assert not thread.is_idle
        core.num_requests = 0


def test_an_engine_that_only_waits_for_a_transfer_is_not_idle(core: FakeCore, thread: EngineThread) -> None:
    wait_until(lambda: thread.is_idle)
    core.step = lambda: StepResult({}, is_idle=True)  # type: ignore[method-assign]  # for this one core
    core.num_requests = 1
    thread.wake()
    wait_until(lambda: thread.seconds_in_step == 0 and thread.stats.has_requests)
    assert not thread.is_idle


class LateWake(threading.Event):
    """An event that tells the thread that clears it to stop, just before."""

    def __init__(self) -> None:
        super().__init__()
        self.stop: Callable[[], None] = lambda: None

    def clear(self) -> None:
        self.stop()
        super().clear()


def test_an_engine_that_is_stopped_just_before_its_step_ends_after_it(core: FakeCore) -> None:
    wake = LateWake()
    thread = EngineThread(cast(EngineCore, core), lambda outputs: None, lambda error: None, wake)
    stopping = threading.Thread(target=thread.stop)

    def stop() -> None:
        if not stopping.is_alive():
            stopping.start()
            assert wake.wait(_TIMEOUT_S)

    wake.stop = stop
    thread.start()
    wait_until(lambda: not thread._thread.is_alive())
    stopping.join(_TIMEOUT_S)


def test_only_the_engine_thread_is_bound_to_its_cores_and_they_are_free_when_it_has_ended(core: FakeCore) -> None:
    everywhere = os.sched_getaffinity(0)
    cores, name = (min(everywhere),), f"test-{uuid4().hex}"
    share, host = CpuShare(1, 1), HostCpus(cores)
    seen: list[set[int]] = []

    def step() -> StepResult:
        seen.append(os.sched_getaffinity(0))
        return StepResult({}, is_idle=True)

    def decide() -> CpuBinding:
        return decide_binding(ComputeThreads(1, "auto"), share, host, name)

    core.step = step  # type: ignore[method-assign]  # for this one core
    binding = decide()
    thread = EngineThread(cast(EngineCore, core), lambda outputs: None, lambda error: None, threading.Event(), binding)
    thread.start()
    wait_until(lambda: bool(seen))
    assert (seen[0], os.sched_getaffinity(0)) == (set(cores), everywhere)
    assert decide().cores == ()
    thread.stop()
    next_binding = decide()
    assert next_binding.cores == cores
    next_binding.release()


def test_a_snapshot_for_a_client_counts_the_clients_requests(core: FakeCore, thread: EngineThread) -> None:
    core.num_requests = 4
    thread.wake()
    wait_until(lambda: thread.stats_for(3).num_running_reqs == 4)
    wait_until(lambda: (load := thread.stats_for(3).load_report) is not None and load.num_taken_requests == 4)
    load = thread.stats_for(8).load_report
    assert load is not None
    assert (load.num_taken_requests, load.num_taken_from_all) == (0, 4)
    time.sleep(0.05)
    later = thread.stats_for(8).load_report
    assert later is not None
    assert later.describes_in_s < 0, "the snapshot is of the end of a step that is over"
    core.num_requests = 0
