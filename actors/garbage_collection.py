"""Python's garbage collector while a process of ours starts.

torch and transformers are some hundred thousand objects that live as long as the process: collecting while they are
imported finds next to nothing and takes a fifth of the time.

They are not left out of later collections (gc.freeze()): CPython makes a full one when what is new amounts to a quarter
of what is old, so that with little that counts as old they come often, and an ingress with 3000 streams gave its tokens
10 to 17 ms late at p99 instead of 4 (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """While this lasts nothing is collected by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
