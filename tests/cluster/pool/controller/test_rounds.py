"""A bug in one round is shown and followed by a pause; only one that stays ends the process.

Tests of cluster/pool/journal.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from actors.process.ray_calls import FailureKind, RayCallFailed
from cluster.pool.controller.rounds import Rounds
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.head_probe import HeadProbe


class World:
    """Rounds that stop after some; `ended` says why the process was to end."""

    def __init__(self, num_rounds: int) -> None:
        self.journal = Journal()
        self.head = HeadProbe()
        self.ended: list[str] = []
        self.num_looks = 0
        self._num_rounds = num_rounds
        self._is_stopping = asyncio.Event()
        self._rounds = Rounds(
            self.journal,
            self.head,
            self._is_stopping,
            first_pause_s=1e-6,
            end=self._end,
            end_replaced=self._end_replaced,
        )

    async def run(self, faults: Callable[[int], Exception | None]) -> None:
        async def look() -> None:
            self.num_looks += 1
            if self.num_looks == self._num_rounds:
                self._is_stopping.set()
            if (fault := faults(self.num_looks)) is not None:
                raise fault

        async with asyncio.timeout(60):
            await self._rounds.repeat("looking after things", look, self._nothing)

    async def _end(self, doing: str) -> None:
        self.ended.append(doing)
        self._is_stopping.set()

    def _end_replaced(self) -> None:
        self.ended.append("replaced")
        self._is_stopping.set()

    @staticmethod
    async def _nothing() -> None:
        await asyncio.sleep(0)

    @property
    def decisions(self) -> list[str]:
        return [decision.text for decision in self.journal.decisions]


async def test_a_bug_of_one_round_is_shown_and_the_next_round_comes() -> None:
    world = World(num_rounds=3)
    await world.run(lambda number: IndexError("list index out of range") if number == 2 else None)
    assert world.num_looks == 3
    assert world.decisions == [
        "looking after things failed by a bug, 1 of 5 times: IndexError: list index out of range"
    ]
    assert not world.ended


async def test_a_bug_that_stays_ends_the_process_after_several_rounds() -> None:
    world = World(num_rounds=100)
    await world.run(lambda number: IndexError("list index out of range"))
    assert (world.num_looks, world.ended) == (5, ["looking after things"])


async def test_bugs_with_good_rounds_between_them_end_nothing() -> None:
    world = World(num_rounds=40)
    await world.run(lambda number: IndexError("now and then") if number % 5 else None)
    assert world.num_looks == 40
    assert not world.ended


async def test_a_call_that_failed_is_no_bug() -> None:
    world = World(num_rounds=20)
    await world.run(lambda number: RayCallFailed(FailureKind.UNAVAILABLE, "the network is away"))
    assert world.num_looks == 20
    assert not world.ended
    assert not world.decisions


async def test_without_rays_head_no_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_rounds=20)
    monkeypatch.setattr(HeadProbe, "is_answering", False)
    await world.run(lambda number: RuntimeError("Failed to connect to GCS"))
    assert world.num_looks == 20
    assert not world.ended


async def test_a_controller_that_ray_has_replaced_ends_at_its_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_rounds=20)
    await world.run(lambda number: setattr(world.head, "is_own_node_dead", number == 3))
    assert (world.num_looks, world.ended) == (3, ["replaced"])


async def test_the_pause_after_a_bug_ends_with_the_cluster() -> None:
    journal, stopping = Journal(), asyncio.Event()
    rounds = Rounds(journal, HeadProbe(), stopping, first_pause_s=3600.0)
    looks = itertools.count()

    async def look() -> None:
        next(looks)
        raise IndexError

    async def wait() -> None:
        await asyncio.sleep(0)

    asyncio.get_running_loop().call_later(0.01, stopping.set)
    async with asyncio.timeout(60):
        await rounds.repeat("looking", look, wait)
    assert next(looks) == 1
