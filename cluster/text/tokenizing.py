"""Tokenizes short texts on the event loop and long ones on a thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from actors.process.allocator import give_back_what_is_free

MAX_CHARS_ON_EVENT_LOOP: Final = 4096
"""The longest text to tokenize on the event loop, which takes about 1 ms; more would delay streams noticeably."""
MAX_CHARS_ALONE: Final = 4 * MAX_CHARS_ON_EVENT_LOOP
"""The same limit while no stream is open: a thread costs 0.1 ms or more."""
MAX_CHARS_SIDE_BY_SIDE: Final = 1 << 18
"""Longer texts are tokenized one after the other, each on a thread of its own, whose end frees its buffers."""
NUM_THREADS: Final = 2
CHARS_PER_THREAD: Final = 4_000_000
"""A thread is replaced after this many characters, which bounds its caches: they take some 10 bytes a character."""
_T = TypeVar("_T")


async def off_event_loop(num_chars: int, tokenize: Callable[[], _T], max_chars: int = MAX_CHARS_ON_EVENT_LOOP) -> _T:
    """Call a function that tokenizes, on a thread if the text has more than max_chars."""
    if num_chars <= max_chars:
        return tokenize()
    loop = asyncio.get_running_loop()
    if num_chars <= MAX_CHARS_SIDE_BY_SIDE:
        return await asyncio.wrap_future(_threads().submit(num_chars, tokenize), loop=loop)
    return await loop.run_in_executor(_turns_of_huge_texts(), lambda: _on_own_thread(tokenize))


class RenewedThreads:
    """Threads that are replaced once they have read enough characters, to free what libraries cache for a thread.

    Several threads may use it at once.
    """

    def __init__(self, num_threads: int, chars_per_thread: int) -> None:
        self._num_threads = num_threads
        self._max_chars = num_threads * chars_per_thread
        self._lock = threading.Lock()
        self._num_chars = 0
        self._threads = self._new()

    def submit(self, num_chars: int, tokenize: Callable[[], _T]) -> Future[_T]:
        """Call a function on one of the threads. Threads that are replaced finish what was submitted before."""
        with self._lock:
            if self._num_chars >= self._max_chars:
                self._threads.shutdown(wait=False)
                self._threads, self._num_chars = self._new(), 0
            self._num_chars += num_chars
            return self._threads.submit(tokenize)

    def _new(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "tokenize")


def _on_own_thread(tokenize: Callable[[], _T]) -> _T:
    """Call a function on a new thread, and return the freed memory to the system, which the allocator would keep."""
    try:
        with ThreadPoolExecutor(1, "tokenize-huge") as thread:
            return thread.submit(tokenize).result()
    finally:
        give_back_what_is_free()


@functools.cache
def _threads() -> RenewedThreads:
    """Return the threads that all ingresses of this process share."""
    return RenewedThreads(NUM_THREADS, CHARS_PER_THREAD)


@functools.cache
def _turns_of_huge_texts() -> ThreadPoolExecutor:
    """Return the thread on which huge texts wait for their turn: their tokens take 100 bytes for each character."""
    return ThreadPoolExecutor(1, "tokenize-turns")
