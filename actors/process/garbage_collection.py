"""Python's garbage collector in a process of ours: no collection while it imports, and few long ones while it serves.

torch and transformers are some hundred thousand objects that live as long as the process: collecting while they are
imported finds next to nothing and takes a fifth of the time, and a full collection of an engine's or an ingress's
process takes 100 to 250 ms, in which no stream gets a token (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MIDDLE_PER_FULL = 1000
"""With Python's other thresholds: a full collection at most every 7 million objects that came and did not go."""


@contextmanager
def no_collection() -> Iterator[None]:
    """While this lasts nothing is collected by itself, and what there is at its end is left out of later collections.

    For imports: what they leave as garbage is little (78 objects of an engine's 411 000), and stays.
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
    """Let no later collection walk what there is now, but for garbage, which goes.

    For a process that has loaded all that it serves with.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Let full collections be rare. For a process with thousands of streams, whose objects they would all walk.

    Left to itself CPython makes one whenever a quarter has been added to what lived through the last one, which is
    often while streams are opened: 3000 of them are 360 000 objects, or 130 ms. They are in no cycles when they end.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _MIDDLE_PER_FULL)
