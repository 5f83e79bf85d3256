"""Makes the allocator give freed memory back to the system. glibc's keeps much of it; others are left alone."""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 1 << 20
"""At the end of each of glibc's arenas, of which there are up to eight for each core."""
_INTERVAL_S: Final = 2.0
_GROWTH_BYTES: Final = 16 << 20
_TIMES_AFTER_GROWTH: Final = 30


def give_back_large_blocks() -> None:
    """From now on have blocks of a megabyte or more given back to the system when they are freed.

    By default glibc learns from the largest block that was freed, up to 32 MiB, to keep such blocks: what comes between
    them then leaves holes, and the process never shrinks again.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_regularly(interval_s: float = _INTERVAL_S) -> None:
    """From now on give back what was freed for a minute after each growth, on a thread that ends with the process.

    Large messages come in parts of tens of kilobytes, which leave holes in every thread's arena. glibc fills these with
    what comes next, but a process never shrinks by it: after a few hundred large messages it was 150 MiB larger.
    """
    threading.Thread(target=_give_back_after_growth, args=(interval_s,), name="allocator", daemon=True).start()


def give_back_what_is_free() -> None:
    """Give back memory that was freed. It takes milliseconds, and is for threads that nobody waits for."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _give_back_after_growth(interval_s: float) -> None:
    never, num_left = threading.Event(), 0
    before = _resident_bytes()
    while not never.wait(interval_s):
        now = _resident_bytes()
        if now > before + _GROWTH_BYTES:
            # What it has grown by may be in use for some time yet.
            num_left = _TIMES_AFTER_GROWTH
        if num_left:
            num_left -= 1
            give_back_what_is_free()
            now = _resident_bytes()
        before = now


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
