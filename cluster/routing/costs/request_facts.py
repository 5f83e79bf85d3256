"""The sizes and aims of a request, on which its cost depends beside its engines, and what it costs to miss an aim."""

from __future__ import annotations

import math
from typing import Final

import msgspec

_LOGISTIC: Final = math.sqrt(3) / math.pi
"""A logistic distribution with the standard deviation 1 has this scale."""
MIN_SCALE_S: Final = 1e-9
MAX_EXPONENT: Final = 50.0
_PENALTY: Final = 10.0
"""A missed aim costs this many times the time in which the whole answer would have met its aims."""


class RequestFacts(msgspec.Struct, frozen=True):
    """The facts of a request that its cost depends on.

    num_tokens:        of its prompt, and of the output that it comes with
    num_output_tokens: how many more are expected
    ttft_s, itl_s:     its aims; None: it has none
    now_s:             the time, by the clock of the load book
    waited_s:          for how long the client has waited already; 0 for a request that has just come
    only_own_time:     whether the request's own time is all that costs: neither missed aims nor the delay of others do
    """

    num_tokens: int
    num_output_tokens: float
    ttft_s: float | None = None
    itl_s: float | None = None
    now_s: float = 0.0
    waited_s: float = 0.0
    only_own_time: bool = False

    @property
    def penalty_s(self) -> float:
        """The cost of a missed aim."""
        if self.only_own_time:
            return 0.0
        return _PENALTY * ((self.ttft_s or 0.0) + (self.itl_s or 0.0) * self.num_output_tokens)


def miss_probability(predicted_s: float, aim_s: float | None, sigma: float) -> float:
    """Return the probability that a time exceeds an aim; sigma: the relative standard deviation of the prediction."""
    if aim_s is None:
        return 0.0
    scale = sigma * predicted_s
    exponent = (aim_s - predicted_s) / ((max(MIN_SCALE_S, scale)) * _LOGISTIC)
    if exponent > MAX_EXPONENT:
        exponent = MAX_EXPONENT
    elif exponent < -MAX_EXPONENT:
        exponent = -MAX_EXPONENT
    return 1 / (1 + math.exp(exponent))
