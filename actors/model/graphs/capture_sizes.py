"""The batch sizes for which decode steps are captured, and which of them a step uses. Numbers only; no device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_SMALL_SIZES: Final = (1, 2, 4)
_STEP: Final = 8
_LARGEST: Final = 256


def capture_sizes(configured: Sequence[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, in increasing order; none is larger than the largest batch.

    configured: the setting; None stands for 1, 2, 4, 8, 16, 24 and so on up to 256, and the largest batch if it is
        smaller than that
    """
    wanted: set[int] = (
        set(configured) if configured is not None else {*_SMALL_SIZES, *range(_STEP, _LARGEST + 1, _STEP)}
    )
    sizes = {size for size in wanted if size <= max_num_seqs}
    if configured is None and max_num_seqs < _LARGEST:
        sizes.add(max_num_seqs)
    return tuple(sorted(sizes))


def smallest_that_holds(sizes: Sequence[int], num_requests: int) -> int | None:
    """Return the smallest size for a batch; None if the batch is larger than all. sizes: in increasing order"""
    place = bisect_left(sizes, num_requests)
    return sizes[place] if place < len(sizes) else None
