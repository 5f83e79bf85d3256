"""Where texts are tokenized: short ones where they are, long ones on a thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from cluster.fast_encoder import NUM_THREADS

MAX_CHARS_ON_EVENT_LOOP: Final = 4096
"""Longer prompts are tokenized on a thread: about a millisecond of work is where streams begin to notice."""
MAX_CHARS_ALONE: Final = 4 * MAX_CHARS_ON_EVENT_LOOP
"""Where there are no streams: the way to a thread and back is a tenth of a millisecond, and more on a busy machine."""
_T = TypeVar("_T")


async def off_event_loop(num_chars: int, tokenize: Callable[[], _T], max_chars: int = MAX_CHARS_ON_EVENT_LOOP) -> _T:
    """Call it, on a thread if it is about more characters than these."""
    if num_chars <= max_chars:
        return tokenize()
    return await asyncio.get_running_loop().run_in_executor(_threads(), tokenize)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Of all ingresses of this process."""
    return ThreadPoolExecutor(NUM_THREADS, "tokenize")
