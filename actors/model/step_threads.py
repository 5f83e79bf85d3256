"""Chooses the number of torch's threads for a step: a step of one token leaves a core to what delivers its token.

Where an engine computes on every core of its host, its threads wait for each other whenever the ingress, the client or
the engine's own event loop has a core, which is after every token. A step of one token is bound by memory: where one
thread less reads it about as fast, there is nothing to lose. Where all threads are faster by a good part, as two cores
may read twice as fast as one, and two threads of one core do not, all of them compute it. Each start tries that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_WORTH_ALL_CORES: Final = 0.85
"""The part of the fewer threads' time that all threads may take at most, to be preferred."""

_LEAST_TRIES, _MOST_TRIES = 3, 16
"""Timed steps with each number of threads; the fastest counts, as other work only slows a step down."""
_TRIAL_S: Final = 0.3
"""Further steps are timed up to this time. Other processes start beside an engine, and all threads wait for each core
that one of these has."""


@dataclass(frozen=True, slots=True)
class StepThreads:
    """Numbers of torch's threads.

    all_threads: for steps of several tokens, and outside of steps
    of_one_token: for a step of one token; 0 stands for all threads
    """

    all_threads: int
    of_one_token: int = 0

    @classmethod
    def beside(cls, num_threads: int, num_cores: int) -> StepThreads:
        """Leave a core free if the threads take all cores. num_cores: that this process may use"""
        takes_all = 1 < num_threads == num_cores
        return cls(num_threads, num_threads - 1 if takes_all else 0)

    @contextmanager
    def for_step(self, num_tokens: int) -> Iterator[None]:
        """Let the calling thread compute a step with its number of threads; afterwards it has all again."""
        if num_tokens != 1 or not self.of_one_token:
            yield
            return
        torch.set_num_threads(self.of_one_token)
        try:
            yield
        finally:
            torch.set_num_threads(self.all_threads)

    def tried(self, compute: Callable[[], Tensor], clock: Callable[[], float] = time.perf_counter) -> StepThreads:
        """Compute a step of one token both ways; return the numbers to go on with.

        All threads compute it if the results have other bits, since a request's tokens must not depend on whether
        others are in its step, or if all are faster by a good part.
        """
        if not self.of_one_token:
            return self
        with self.for_step(1):
            result = compute()
        if not torch.equal(compute(), result):
            return StepThreads(self.all_threads)
        fewer_s, all_s = list[float](), list[float]()
        for number in range(_MOST_TRIES):
            if number >= _LEAST_TRIES and sum(fewer_s) + sum(all_s) >= _TRIAL_S:
                break
            with self.for_step(1):
                fewer_s.append(_duration_s(compute, clock))
            all_s.append(_duration_s(compute, clock))
        return StepThreads(self.all_threads) if min(all_s) <= _WORTH_ALL_CORES * min(fewer_s) else self

    def __str__(self) -> str:
        """Say what differs for a step of one token, to be put after the number of threads; empty if nothing does."""
        return f"; {self.of_one_token} for a step of one token" if self.of_one_token else ""


def _duration_s(compute: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    start = clock()
    compute()
    return clock() - start


def num_usable_cores() -> int:
    """Return the number of logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
