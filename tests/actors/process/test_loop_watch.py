"""A loop that is busy is seen from outside while it is, and remembered for a minute."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from actors.process import loop_watch
from actors.process.loop_watch import LoopWatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "_INTERVAL_S", 0.001)


async def rounds(watch: LoopWatch) -> None:
    """The loop gets round."""
    for _ in range(3):
        await asyncio.sleep(0.005)


async def test_a_loop_that_gets_round_is_not_busy() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    assert watch.busy_s == 0.0
    watch.start()
    await rounds(watch)
    assert (watch.busy_s, watch.longest_lag_s) == (0.0, 0.0)


async def test_a_lag_is_remembered_for_a_minute_and_a_larger_one_outlives_it() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    watch.start()
    for lag_s in (3.0, 5.0, 1.0):
        clock.now_s += lag_s
        await rounds(watch)
    assert watch.longest_lag_s == pytest.approx(5.0, abs=0.01)
    clock.now_s += 59.5
    assert watch.longest_lag_s == pytest.approx(59.5, abs=0.01), "it is late at this very moment"
    await rounds(watch)
    assert watch.longest_lag_s == pytest.approx(59.5, abs=0.01)
    clock.now_s += 61.0
    await rounds(watch)
    clock.now_s += 61.0
    await rounds(watch)
    assert watch.longest_lag_s == pytest.approx(61.0, abs=0.01)


async def test_another_thread_sees_that_the_loop_is_busy_while_it_is() -> None:
    watch = LoopWatch()
    watch.start()
    await rounds(watch)
    seen_s: list[float] = []
    is_seen = threading.Event()

    def look() -> None:
        deadline_s = time.monotonic() + 60
        while watch.busy_s < 0.05 and time.monotonic() < deadline_s:
            is_seen.wait(0.005)
        seen_s.append(watch.busy_s)
        is_seen.set()

    looking = threading.Thread(target=look)
    looking.start()
    assert is_seen.wait(60), "the loop is busy with this until it is seen"
    looking.join()
    await rounds(watch)
    assert seen_s[0] >= 0.05
    assert watch.longest_lag_s >= 0.05
