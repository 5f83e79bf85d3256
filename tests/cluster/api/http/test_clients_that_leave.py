"""A client that leaves ends its request's work, and what the request was is freed at once.

Tests of cluster/api/http/streams.py.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from starlette.types import Message

from cluster.api.http.streams import unless_client_leaves


class Prompt:
    """Large, in earnest."""


class Client:
    """A client whose whole request has come."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def _waiting(kept: list[weakref.ref[Prompt]] | None = None) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        prompt = Prompt()
        if kept is not None:
            kept.append(weakref.ref(prompt))
        await asyncio.Event().wait()

    return work


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_that_ends_before_the_client_leaves_is_done() -> None:
    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("done")

    await unless_client_leaves(Client().receive, work)
    assert done == ["done"]


async def test_a_client_that_leaves_ends_the_work_and_nothing_else() -> None:
    client = Client()

    async def call() -> str:
        await unless_client_leaves(client.receive, _waiting())
        await asyncio.sleep(0)
        return "it goes on"

    task = asyncio.create_task(call())
    await _settled()
    client.has_left.set()
    assert await asyncio.wait_for(task, 60) == "it goes on"
    assert task.cancelling() == 0


async def test_a_server_that_ends_cancels_the_call_even_if_its_client_leaves_as_well() -> None:
    client = Client()
    task = asyncio.create_task(unless_client_leaves(client.receive, _waiting()))
    await _settled()
    client.has_left.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_work_that_ends_in_spite_of_its_cancellation_leaves_no_cancellation() -> None:
    client = Client()

    async def work() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    task = asyncio.create_task(unless_client_leaves(client.receive, work))
    await _settled()
    client.has_left.set()
    await asyncio.wait_for(task, 60)
    assert task.cancelling() == 0


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await unless_client_leaves(Client().receive, work)


async def test_a_client_that_leaves_leaves_nothing_to_the_garbage_collector() -> None:
    client, kept = Client(), list[weakref.ref[Prompt]]()
    gc.disable()
    try:
        task = asyncio.create_task(unless_client_leaves(client.receive, _waiting(kept)))
        await _settled()
        assert kept[0]() is not None
        client.has_left.set()
        await asyncio.wait_for(task, 60)
        await _settled()
        assert kept[0]() is None
    finally:
        gc.enable()
