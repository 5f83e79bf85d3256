"""Measures the load of the last seconds: how many requests come, and how large they are.

It is what was sent to engines, by this ingress and by the others, which announce what they send. Each request counts
less as time goes by, and so does the time in which none came: sums over the decayed time are averages, from the first
second on, and from the first second of a load that comes after a quiet time.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from actors.core.outputs.sent_work import SentWork

_MEMORY_S: Final = 5.0
"""The time over which the load is averaged."""
_MIN_REQUESTS: Final = 4.0
"""Fewer requests than this within the time tell nothing of the next ones."""
QUIET_S: Final = 2.0
"""A load that comes after so long without any request is a new one: the quiet time does not count."""


class RecentRates(msgspec.Struct, frozen=True):
    """Averages per second.

    num_requests:        that decode
    num_computed_tokens: tokens of prompts that are computed, as they were not cached at the engines chosen for that
    num_prompt_tokens:   tokens of all prompts
    num_output_tokens:   tokens that are expected to be decoded
    """

    num_requests: float = 0.0
    num_computed_tokens: float = 0.0
    num_prompt_tokens: float = 0.0
    num_output_tokens: float = 0.0

    def __add__(self, other: RecentRates) -> RecentRates:
        """Return the sum of two loads."""
        return RecentRates(
            self.num_requests + other.num_requests,
            self.num_computed_tokens + other.num_computed_tokens,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_output_tokens + other.num_output_tokens,
        )


class RecentLoad:
    """Sums over the last seconds, of which the older ones count less."""

    def __init__(self) -> None:
        """Know of no request yet."""
        self._noted_s = -math.inf
        self._begin(0.0)

    def note(self, sent: SentWork, now_s: float) -> None:
        """Take in what was sent to one engine. Prompts whose vectors are wanted do not count.

        now_s: the time, which never goes back
        """
        if now_s - self._noted_s > QUIET_S:
            self._begin(now_s)
        self._noted_s = now_s
        self._forget(now_s)
        if sent.num_context_tokens or sent.consumer is not None:
            self._computed += sent.num_computed_tokens
            self._handoffs += sent.consumer is not None
        if sent.num_context_tokens:
            self._requests += 1
            self._prompts += sent.num_context_tokens
            self._outputs += sent.num_output_tokens

    def rates(self, now_s: float) -> RecentRates:
        """Return the averages; nothing if there were too few requests to tell."""
        self._forget(now_s)
        # Engines of one kind may compute prompts for those of another kind only.
        if self._time_s <= 0 or max(self._requests, self._handoffs) < _MIN_REQUESTS:
            return RecentRates()
        sums = (self._requests, self._computed, self._prompts, self._outputs)
        return RecentRates(*(one / self._time_s for one in sums))

    def _begin(self, now_s: float) -> None:
        self._at_s = now_s
        self._time_s = self._requests = self._handoffs = self._computed = self._prompts = self._outputs = 0.0

    def _forget(self, now_s: float) -> None:
        if now_s <= self._at_s:
            return
        kept = math.exp((self._at_s - now_s) / _MEMORY_S)
        self._at_s = now_s
        self._time_s = kept * self._time_s + _MEMORY_S * (1 - kept)
        self._requests, self._handoffs = kept * self._requests, kept * self._handoffs
        self._computed = kept * self._computed
        self._prompts, self._outputs = kept * self._prompts, kept * self._outputs
