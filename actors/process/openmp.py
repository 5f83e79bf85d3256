"""How the threads of OpenMP wait for work, which OpenMP reads once, when torch is loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_WAIT_POLICY: Final = "OMP_WAIT_POLICY"
_SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_BLOCK_TIME: Final = "KMP_BLOCKTIME"
_NUM_SPINS: Final = 10_000
"""About 0.25 ms, longer than Python needs between two operators: threads are not woken for each of a step's."""
_BLOCK_TIME_MS: Final = 1
"""The shortest time that Intel's library can be told in every version, besides none."""


def choose_waiting(*, on_own_cores: bool) -> None:
    """Let the threads of OpenMP sleep while they have no work, unless the environment says how they wait.

    Call it before torch is loaded. GNU's library, which comes with torch's wheels, lets threads spin for some
    milliseconds after each operator by default, and Intel's for 200, which takes the cores from everything else on the
    host.

    on_own_cores: no other engine computes on the cores of this one. Then threads spin for a moment before they sleep,
                  because waking them for each operator of a decode step takes longer than the operator.
    """
    if any(name in os.environ for name in (_WAIT_POLICY, _SPIN_COUNT, _BLOCK_TIME)):
        return
    if on_own_cores:
        os.environ[_SPIN_COUNT] = str(_NUM_SPINS)
        os.environ[_BLOCK_TIME] = str(_BLOCK_TIME_MS)
    else:
        os.environ[_WAIT_POLICY] = "PASSIVE"


async def call_in_ending_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that computes with torch in a thread that ends with the call, and return its result.

    Every thread that computes has threads of OpenMP's of its own until it ends. GNU's library counts those of all
    threads, and hardly spins any more once they are more than the cores.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="start")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(function, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)
