"""Where texts are tokenized, by their length."""

from __future__ import annotations

import asyncio
import threading

from cluster.tokenizing import MAX_CHARS_ON_EVENT_LOOP, MAX_CHARS_SIDE_BY_SIDE, off_event_loop


async def _thread_of(num_chars: int) -> str:
    return await off_event_loop(num_chars, lambda: threading.current_thread().name)


async def test_short_texts_are_tokenized_where_they_are_and_others_on_threads() -> None:
    assert await _thread_of(MAX_CHARS_ON_EVENT_LOOP) == threading.current_thread().name
    assert (await _thread_of(MAX_CHARS_SIDE_BY_SIDE)).startswith("tokenize_")
    assert (await _thread_of(MAX_CHARS_SIDE_BY_SIDE + 1)).startswith("tokenize-huge")


async def test_huge_texts_are_tokenized_one_after_the_other() -> None:
    running = most = 0
    lock = threading.Lock()
    first_may_end = threading.Event()

    def tokenize() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        first_may_end.wait(10)
        with lock:
            running -= 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(off_event_loop(MAX_CHARS_SIDE_BY_SIDE + 1, tokenize))
        await off_event_loop(MAX_CHARS_SIDE_BY_SIDE, first_may_end.set)
    assert most == 1
