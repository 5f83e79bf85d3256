"""Makes glibc's allocator give freed memory back to the system; by default the allocator keeps much of the memory.

With other allocators the functions do nothing.
"""

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
"""Free memory that may stay at the end of each of glibc's arenas, of which there are up to eight for each core."""
_INTERVAL_S: Final = 2.0
_GROWTH_BYTES: Final = 16 << 20
_TIMES_AFTER_GROWTH: Final = 30


def give_back_large_blocks() -> None:
    """Let glibc return memory blocks of 1 MiB or more to the system as soon as they are freed.

    By default glibc begins to keep blocks up to the size of the largest one that was freed, at most 32 MiB. Smaller
    blocks between these then leave holes, and the process never shrinks again.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_regularly(interval_s: float = _INTERVAL_S) -> None:
    """Start a thread that returns freed memory to the system regularly for a minute after each growth of the process.

    interval_s: time between two looks at the process's size
    Large messages come in parts of tens of kilobytes, which leave holes in every thread's arena. glibc uses the holes
    again, but the process never shrinks: after a few hundred large messages a process was 150 MiB larger. The thread
    ends with the process.
    """
    threading.Thread(target=_give_back_after_growth, args=(interval_s,), name="allocator", daemon=True).start()


def give_back_what_is_free() -> None:
    """Return freed memory to the system. The call blocks for milliseconds, so call it on a thread that can wait."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _give_back_after_growth(interval_s: float) -> None:
    never, num_left = threading.Event(), 0
    before = _resident_bytes()
    while not never.wait(interval_s):
        now = _resident_bytes()
        if now > before + _GROWTH_BYTES:
            # The new memory may stay in use for some time, so free memory is given back in several of the next
            # intervals.
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
