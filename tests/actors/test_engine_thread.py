"""When the thread that steps an engine says that nothing is to be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.engine_core import EngineCore, StepResult
from actors.engine_thread import EngineThread

_TIMEOUT_S = 10.0


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
        return SchedulerStats(num_running_reqs=self.num_requests)

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
