"""The thread on which texts are tokenized, by their length."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from cluster.text.tokenizing import MAX_CHARS_ON_EVENT_LOOP, MAX_CHARS_SIDE_BY_SIDE, RenewedThreads, off_event_loop


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
        first_may_end.wait(60)
        with lock:
            running -= 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(off_event_loop(MAX_CHARS_SIDE_BY_SIDE + 1, tokenize))
        await off_event_loop(MAX_CHARS_SIDE_BY_SIDE, first_may_end.set)
    assert most == 1


def test_a_thread_is_replaced_once_it_has_read_its_share() -> None:
    threads = RenewedThreads(num_threads=1, chars_per_thread=100)
    read_by = [threads.submit(num_chars, threading.current_thread).result(60) for num_chars in (60, 60, 60, 60, 60)]
    first, _, second, _, third = read_by
    assert [read_by.index(thread) for thread in read_by] == [0, 0, 2, 2, 4]
    for replaced in (first, second):
        replaced.join(60)
        assert not replaced.is_alive()
    assert third.is_alive()


def test_what_was_submitted_before_threads_are_replaced_is_done() -> None:
    threads = RenewedThreads(num_threads=1, chars_per_thread=1)
    may_go_on = threading.Event()
    first = threads.submit(1, lambda: may_go_on.wait(60))
    behind = [threads.submit(1, lambda number=number: number) for number in range(4)]  # type: ignore[misc]  # a loop's
    may_go_on.set()
    assert first.result(60)
    assert [future.result(60) for future in behind] == [0, 1, 2, 3]


_MEMORY = """
import asyncio
import random
from pathlib import Path

import cluster
from actors.process.allocator import give_back_large_blocks, give_back_what_is_free
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.text.tokenizing import off_event_loop

def rss_mib():
    give_back_what_is_free()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

async def main():
    give_back_large_blocks()
    tokenizer = ModelTokenizer.from_directory(Path(cluster.__file__).parent / "demo_model", use_fastokens=True)
    assert not tokenizer.why_not_fast
    generator = random.Random(1)

    def words(num_chars):
        letters = generator.randbytes(num_chars // 2).hex().translate(str.maketrans("0123456789", "ghijklmnop"))
        return " ".join(letters[at : at + 7] for at in range(0, num_chars * 7 // 8, 7))

    async def encode(text):
        await off_event_loop(len(text), lambda: len(tokenizer.encode(text)))

    await asyncio.gather(*(encode(words(50_000)) for _ in range(4)))
    first = rss_mib()
    for text in ("😀" * 4_000_000, "x" * 2_000_000, words(1_000_000)):
        await encode(text)
        del text
    assert rss_mib() < first + 50, (first, rss_mib())
    for _ in range(250):
        await asyncio.gather(encode(words(50_000)), encode(words(50_000)))
    assert rss_mib() < first + 130, (first, rss_mib())

asyncio.run(main())
"""


@pytest.mark.timeout(630)
def test_texts_and_words_that_never_came_before_are_not_remembered_for_ever() -> None:
    """25 million characters of new words are what fills what a thread remembers, up to 100 MiB for each thread."""
    subprocess.run([sys.executable, "-c", _MEMORY], check=True, timeout=600)
