"""What the process's allocator does with memory that was freed. glibc's keeps much of it; others are left alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 20


def give_back_large_blocks() -> None:
    """From now on have blocks of a megabyte or more given back to the system when they are freed.

    By default glibc learns from the largest block that was freed, up to 32 MiB, to keep such blocks: what comes between
    them then leaves holes, and the process never shrinks again.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_what_is_free() -> None:
    """Give back memory that was freed. It takes milliseconds, and is for threads that nobody waits for."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
