"""Runs work side by side, of which all has to succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def all_together(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order of the work. The first failure cancels the rest and is raised.

    All work has ended when this returns or raises, also when it is cancelled. An error leaves nothing to the garbage
    collector, unlike that of an asyncio.TaskGroup: its frames refer to prompts, and clients can make work fail cheaply.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failure = _first_failure(tasks)
        if failure is None:
            return [task.result() for task in tasks]
    finally:
        await _end(tasks)
        # A task keeps its error, whose traceback will refer to this frame.
        tasks.clear()
    try:
        raise failure
    finally:
        del failure


def _first_failure(tasks: Iterable[asyncio.Task[Any]]) -> BaseException | None:
    for task in tasks:
        if task.done() and (failure := asyncio.CancelledError() if task.cancelled() else task.exception()) is not None:
            return failure
    return None


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
