"""Where texts are tokenized: short ones where they are, long ones on a thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from actors.allocator import give_back_what_is_free
from cluster.fast_encoder import NUM_THREADS

MAX_CHARS_ON_EVENT_LOOP: Final = 4096
"""Longer prompts are tokenized on a thread: about a millisecond of work is where streams begin to notice."""
MAX_CHARS_ALONE: Final = 4 * MAX_CHARS_ON_EVENT_LOOP
"""Where there are no streams: the way to a thread and back is a tenth of a millisecond, and more on a busy machine."""
MAX_CHARS_SIDE_BY_SIDE: Final = 1 << 20
"""Longer texts are tokenized one after the other."""
_T = TypeVar("_T")


async def off_event_loop(num_chars: int, tokenize: Callable[[], _T], max_chars: int = MAX_CHARS_ON_EVENT_LOOP) -> _T:
    """Call it, on a thread if it is about more characters than these."""
    if num_chars <= max_chars:
        return tokenize()
    loop = asyncio.get_running_loop()
    if num_chars <= MAX_CHARS_SIDE_BY_SIDE:
        return await loop.run_in_executor(_threads(), tokenize)
    return await loop.run_in_executor(_thread_of_huge_texts(), lambda: _trimmed(tokenize))


def _trimmed(tokenize: Callable[[], _T]) -> _T:
    """Call it, and give back the memory that it has freed: the allocator would keep it."""
    try:
        return tokenize()
    finally:
        give_back_what_is_free()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Of all ingresses of this process."""
    return ThreadPoolExecutor(NUM_THREADS, "tokenize")


@functools.cache
def _thread_of_huge_texts() -> ThreadPoolExecutor:
    """One after the other: what a million characters are made into takes a hundred bytes for each of them."""
    return ThreadPoolExecutor(1, "tokenize-huge")
