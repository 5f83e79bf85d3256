"""Estimates how many requests all ingresses send to an engine for each one of this ingress."""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 10.0
"""The time over which requests are counted."""
_PRIOR_REQUESTS: Final = 8.0
"""The number of requests that count as this ingress's own before the first report: a few others mean little then."""
MAX_FACTOR: Final = 64.0


class AllIngresses:
    """The ratio of the requests that engines get from all ingresses to those that they get from this one.

    Ingresses see the same reports, and choose by the same rule. So one that sends a request to an engine has to expect
    that the others do the same at the same time: otherwise all would send to the engine that was idle when it reported.
    """

    def __init__(self) -> None:
        """Assume that there is no other ingress."""
        self._num_own = self._num_all = 0.0
        self._at_s = -math.inf

    def note(self, num_own: int, num_all: int, now_s: float) -> None:
        """Count requests that an engine has taken since its last report: this ingress's own, and those of all."""
        kept = math.exp(-max(now_s - self._at_s, 0.0) / _MEMORY_S)
        self._at_s = now_s
        self._num_own = kept * self._num_own + max(num_own, 0)
        self._num_all = kept * self._num_all + max(num_all, num_own, 0)

    @property
    def factor(self) -> float:
        """For how many requests of all ingresses one of this ingress stands: 1 to MAX_FACTOR."""
        return min((self._num_all + _PRIOR_REQUESTS) / (self._num_own + _PRIOR_REQUESTS), MAX_FACTOR)
