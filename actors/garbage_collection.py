"""Python's garbage collector in a process that serves.

Modules, the model and the tokenizer are some hundred thousand objects that live as long as the process. A full
collection that looks at all of them holds every thread up for 0.1 s and more; collecting while they are imported finds
next to nothing and takes a fifth of the time. So they come in without it, and it leaves them out afterwards
(gc.freeze(), https://docs.python.org/3/library/gc.html#gc.freeze).

Only for processes of our own, at their start: what is frozen is never collected, garbage included.
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


def leave_out_what_lives() -> None:
    """Collect once, and never look again at what is left."""
    gc.collect()
    gc.freeze()
