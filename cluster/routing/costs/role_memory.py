"""Remembers what engines could do with roles and without, so that a moment's speed does not change a cluster's state.

How long a step takes depends on what else the machine does, and a fit of the newest steps follows that: beside a busy
engine on the same machine decode steps take 1.5 times as long for half a second. A state of the cluster lasts longer.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cluster.routing.costs.recent_load import QUIET_S
from cluster.routing.decision import RoleUse

_MEMORY_S: Final = 3.0
"""The time over which rates are averaged: a change of speed that lasts counts after that time."""
_FEW: Final = 4
"""Rates of two seconds: they are looked at twice a second."""


class StateRates(msgspec.Struct, frozen=True):
    """Requests per second.

    prompts: of which engines can compute the prompts if roles are kept
    decodes: which they can decode then
    kept:    those of both whose aims are met
    ignored: those whose aims are met if each engine does all of its requests
    """

    prompts: float
    decodes: float
    kept: float
    ignored: float


class RoleMemory:
    """The rates and the choice of the last seconds, for requests with the same aims."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.use = RoleUse.WEIGHED
        self._rates: StateRates | None = None
        self._num_averaged = 0
        self._at_s = -math.inf

    @property
    def is_new(self) -> bool:
        """Whether so few rates were averaged that they are those of a load that has just begun."""
        return self._num_averaged < _FEW

    def begin(self, now_s: float) -> None:
        """Forget everything if the load that comes is another one than that of the last rates, after a quiet time."""
        if now_s - self._at_s > QUIET_S:
            self.use, self._rates, self._num_averaged = RoleUse.WEIGHED, None, 0

    def averaged(self, rates: StateRates, now_s: float) -> StateRates:
        """Return the average with those of the last seconds, as long as the choice has mattered; it is kept."""
        elapsed_s, self._at_s = max(now_s - self._at_s, 0.0), now_s
        self._num_averaged += 1
        part = max(1 / self._num_averaged, 1 - math.exp(-elapsed_s / _MEMORY_S))
        if self._rates is not None and part < 1:
            pairs = zip(msgspec.structs.astuple(self._rates), msgspec.structs.astuple(rates), strict=True)
            rates = StateRates(*(before + part * (new - before) for before, new in pairs))
        self._rates = rates
        return rates

    def note(self, use: RoleUse, *, matters: bool) -> None:
        """Remember a choice. Unless it matters, the averages begin anew: rates under a small load are guesses."""
        self.use = use
        if not matters:
            self._num_averaged = 0
