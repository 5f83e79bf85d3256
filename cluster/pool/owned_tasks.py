"""Tasks in the background, which their owner keeps track of until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator


class OwnedTasks:
    """The tasks of one owner that are not done yet."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(list(self._tasks))

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task for a coroutine. Returns the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
