"""The silence that counts, and from when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import ray

from cluster.pool.ray_objects import head_probe
from cluster.pool.ray_objects.head_probe import HeadProbe
from tests.cluster.pool.fake_ray import nodes_of


class FakeHead:
    """Ray's head as ray.nodes() asks it. Questions that it has not answered wait until `may_answer`."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.answer: Callable[[], list[dict[str, Any]]] = list

    def nodes(self) -> list[dict[str, Any]]:
        self.num_asked += 1
        assert self.may_answer.wait(60)
        return self.answer()


@pytest.fixture
async def head(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeHead]:
    """Its end comes before the event loop's, which waits for the threads that ask."""
    fake = FakeHead()
    monkeypatch.setattr(ray, "nodes", fake.nodes)
    monkeypatch.setattr(head_probe, "_PROBE_TIMEOUT_S", 60.0)
    yield fake
    fake.may_answer.set()


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Until it is so; what it depends on is in threads."""
    async with asyncio.timeout(timeout_s):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


async def test_silence_counts_from_its_begin_while_the_head_answers(head: FakeHead) -> None:
    probe = HeadProbe()
    watch = asyncio.create_task(probe.watch(0.01))
    await until(lambda: head.num_asked >= 3)
    now_s = asyncio.get_running_loop().time()
    assert probe.silence_s(now_s - 5.0) >= 5.0
    watch.cancel()


async def test_nobody_is_silent_while_the_head_is_not_heard_and_the_clock_begins_anew_afterwards(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_probe, "_PROBE_TIMEOUT_S", 0.3)
    probe = HeadProbe()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    watch = asyncio.create_task(probe.watch(0.01))
    head.may_answer.clear()
    await until(lambda: not probe.is_answering)
    assert probe.silence_s(began_s - 100.0) == 0.0
    lost_at_s = loop.time()
    head.may_answer.set()
    await until(lambda: probe.is_answering)
    assert probe.silence_s(began_s - 100.0) <= loop.time() - lost_at_s
    watch.cancel()


async def test_one_question_is_asked_at_a_time(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_probe, "_PROBE_TIMEOUT_S", 0.3)
    probe = HeadProbe()
    watch = asyncio.create_task(probe.watch(0.01))
    head.may_answer.clear()
    await until(lambda: not probe.is_answering)
    num_asked = head.num_asked
    await asyncio.sleep(0.1)
    assert head.num_asked == num_asked
    watch.cancel()


@pytest.mark.parametrize(("dead", "is_ours"), [("a", True), ("b", False)])
async def test_the_head_says_whether_it_has_declared_the_node_of_this_process_dead(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch, dead: str, is_ours: bool
) -> None:
    probe = HeadProbe()
    watch = asyncio.create_task(probe.watch(0.01))
    await until(lambda: head.num_asked >= 2)
    assert not probe.is_own_node_dead
    head.answer = nodes_of(monkeypatch, own="a", alive=["c"], dead=[dead])
    num_asked = head.num_asked
    await until(lambda: head.num_asked >= num_asked + 2)
    assert probe.is_own_node_dead == is_ours
    watch.cancel()
