from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from cluster.vectors.all_together import all_together


class Prompt:
    """Large, in earnest."""


async def _return(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_results_are_in_the_order_of_the_work() -> None:
    assert await all_together(_return(number) for number in range(3)) == [0, 1, 2]
    nothing: list[Coroutine[Any, Any, int]] = []
    assert await all_together(nothing) == []


async def test_the_first_failure_ends_the_rest_and_is_raised() -> None:
    ended: list[str] = []

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("it has ended")
        return 0

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("it is refused")

    with pytest.raises(ValueError, match="it is refused"):
        await all_together([wait(), fail(), wait()])
    assert len(ended) == 2


async def test_cancelling_ends_all() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0

    task = asyncio.create_task(all_together([wait()]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_failure_leaves_nothing_to_the_garbage_collector() -> None:
    kept: list[weakref.ref[Prompt]] = []

    async def fail() -> int:
        prompt = Prompt()
        kept.append(weakref.ref(prompt))
        await asyncio.sleep(0)
        raise ValueError("it is refused")

    async def call() -> str:
        prompt = Prompt()
        kept.append(weakref.ref(prompt))
        try:
            await all_together([fail(), fail(), fail()])
        except ValueError as error:
            return str(error)
        return ""

    gc.disable()
    try:
        assert await call() == "it is refused"
        await asyncio.sleep(0)
        assert [prompt() for prompt in kept] == [None] * 4
    finally:
        gc.enable()
