"""Gives the memory of deleted weights back to the system.

safetensors maps a whole file, and a weight of the checkpoint's data type is a part of the mapping. The mapping lives as
long as any weight in it, so a weight that is deleted keeps its pages in memory unless the system is told otherwise.
A weight that was converted lies in the heap, and C's library keeps what is freed there.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

_MAPS: Final = Path("/proc/self/maps")
_INODE_FIELD: Final = 4
"""The field of a line of _MAPS that is 0 for memory without a file."""


def trim_heap() -> None:
    """Give back the heap's free pages. Does nothing where C's library is not glibc, whose heap this is about."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MappedPages:
    """The parts of this process's memory that were mapped from files when this object was made."""

    def __init__(self, lines: Iterable[str] | None = None) -> None:
        """lines: of /proc/self/maps; a system without such a file has no parts."""
        if lines is None:
            lines = _MAPS.read_text().splitlines() if _MAPS.exists() else ()
        fields = [line.split(maxsplit=5) for line in lines]
        edges = [field[0].split("-") for field in fields if field[_INODE_FIELD] != "0"]
        self._parts = sorted((int(start, 16), int(end, 16)) for start, end in edges)

    def release(self, weight: Tensor) -> int:
        """Give back the pages that hold nothing but a weight that nobody will read again, and return their bytes.

        weight: contiguous, on the CPU. One that is not mapped from a file is left alone: deleting it is enough.
        """
        first, size = weight.data_ptr(), weight.nbytes
        index = bisect.bisect_right(self._parts, first, key=lambda part: part[0]) - 1
        if index < 0 or first + size > self._parts[index][1]:
            return 0
        # Pages at the edges may hold other weights, too.
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = max(0, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE - start)
        if not size:
            return 0
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return size if advise(start, size, mmap.MADV_DONTNEED) == 0 else 0
