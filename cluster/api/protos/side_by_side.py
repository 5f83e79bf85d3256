"""Reads several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def side_by_side(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Yield the items of several streams as they come, each with its stream's index.

    The first stream that fails closes all the others, and so does closing this generator. Raises what a stream raises.
    """
    queue: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def read(index: int, stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:  # The reader of the queue raises the error.
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    # The error's traceback refers to this frame. If the frame also referred to the error, the two would
                    # form a cycle that keeps prompts in memory.
                    del item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Errors in the queue refer to frames that refer to the queue, which forms another such cycle.
        while not queue.empty():
            queue.get_nowait()
