"""Configures Python's garbage collector: no collection during imports, and few full ones while a process serves.

torch and transformers have some hundred thousand objects, which exist as long as the process. Collections during their
import find next to nothing and take a fifth of the import's time. A full collection of an engine's or an ingress's
process takes 100 to 250 ms, during which no stream gets a token (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEW_PER_YOUNG: Final = 5000
"""New objects for each collection of the youngest generation, beyond those that were freed.

That generation has all that came since the last one, what the streams of requests hold included: 10 000 to 20 000
objects, which take 2 ms. With Python's 700 that is up to a tenth of an ingress's time, and nothing is found
(benchmarks/RESULTS.md).
"""
_MIDDLE_PER_FULL: Final = 1000
"""Collections of the middle generation for each full one: with the other thresholds there is a full collection at most
after every 50 million new objects that were not freed.
"""


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend automatic collections; at the end, exclude all objects that exist from later collections.

    This is for imports. The little garbage that they leave (78 objects of an engine's 411 000) is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def leave_out_what_is_loaded() -> None:
    """Collect garbage once, and exclude all objects that remain from later collections.

    This is for a process that has loaded all that it needs to serve.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Make collections rare, and full ones very rare, in a process with thousands of streams.

    By default CPython runs a full collection whenever the objects have grown by a quarter since the last one, which is
    often while streams are opened: 3000 streams are 360 000 objects, which take 130 ms. Streams that have ended are in
    no cycles, so they are freed without a collection.
    """
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(_NEW_PER_YOUNG, middle, _MIDDLE_PER_FULL)
