"""Limits how much may wait at an ingress, and tells a refused client when to retry. Pure; the clock is passed in.

A request waits until its first token. Two numbers are limited: requests in flight, and prompt tokens that wait. A
refused client is told when there will be room, by how fast requests or tokens have left lately. Clients that are
refused one after another are told later and later times, as if they stood in line.

A request whose client will not wait long enough is refused at once, because it would keep others waiting in vain. Its
waiting time is estimated: the prompt tokens up to its own, divided by the rate at which tokens left the queue while the
queue was not empty, or by the rate of the fastest recent prompt if that is higher. The request is refused only if the
estimate exceeds the client's time by a factor, and rests on enough observations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, Self

from cluster.errors import DeadlineUnreachable, Overloaded, OverloadLimit

_MEMORY_S: Final = 10.0
"""Time constant in seconds of busy time by which older observations lose their weight."""
_MIN_EXPERIENCE_S: Final = 1.0
_MIN_NUM_PROMPTS: Final = 8
_DOUBT: Final = 2.0
"""A deadline counts as out of reach if the estimate is more than this many times the client's time."""
_MIN_DELAY_S, _MAX_DELAY_S = 0.05, 60.0


class DrainRate:
    """How much leaves a queue per second while the queue is not empty. Older observations count less and less."""

    def __init__(self, now_s: float) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        self._at_s = now_s
        self._is_busy = False
        self.busy_since_s = now_s

    def set_busy(self, is_busy: bool, now_s: float) -> None:
        """Note whether the queue has something in it from now on."""
        self._advance(now_s)
        if is_busy and not self._is_busy:
            self.busy_since_s = now_s
        self._is_busy = is_busy

    def add(self, amount: float, now_s: float) -> None:
        """Note that this amount has left the queue."""
        self._advance(now_s)
        self._amount += amount

    def per_s(self, now_s: float) -> float | None:
        """Return the rate per second; None if too little was observed."""
        self._advance(now_s)
        if self._amount == 0 or self._busy_s < _MIN_DELAY_S:
            return None
        return self._amount / self._busy_s

    def _advance(self, now_s: float) -> None:
        if self._is_busy:
            passed_s = now_s - self._at_s
            kept = math.exp(-passed_s / _MEMORY_S)
            self._amount *= kept
            self._busy_s = self._busy_s * kept + passed_s
        self._at_s = now_s


class AdmittedRequest:
    """One request that an ingress has admitted, as a context manager: once it is left, the request does not count."""

    __slots__ = ("_limits", "_num_tokens", "_queued_at_s")

    def __init__(self, limits: OverloadControl) -> None:
        self._limits = limits
        self._num_tokens = 0
        self._queued_at_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the request is queued and has no output token yet."""
        return self._num_tokens > 0

    def queue(self, num_tokens: int, time_left_s: float | None) -> None:
        """Let the request wait for its first token.

        num_tokens:  tokens that an engine has to compute before that
        time_left_s: how long the client still waits; None if it has no deadline
        Raises Overloaded, DeadlineUnreachable.
        """
        if self.is_waiting:
            return  # The request has its place in the queue already: it starts over on another version of the model.
        self._queued_at_s = self._limits.queue(num_tokens, time_left_s)
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """End the request's wait: its first token has come."""
        if self.is_waiting:
            self._limits.begin(self._num_tokens, self._queued_at_s)
            self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_waiting:
            self._limits.give_up(self._num_tokens)
            self._num_tokens = 0
        self._limits.leave()


class OverloadControl:
    """The limits of one ingress: requests in flight, and prompt tokens that wait."""

    def __init__(
        self,
        max_requests: int,
        max_waiting_tokens: int,
        *,
        unknown_delay_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """unknown_delay_s: the delay that a refused client is told before any request has ended"""
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._unknown_delay_s = unknown_delay_s
        self._clock = clock
        now_s = clock()
        self._ends, self._prompts = DrainRate(now_s), DrainRate(now_s)
        self._fastest_prompt_per_s = 0.0
        self._num_prompts = 0
        self._num_refused = 0
        self.num_requests = 0
        self.num_waiting_tokens = 0

    def enter(self) -> AdmittedRequest:
        """Admit one more request. Raises Overloaded."""
        if self.num_requests >= self._max_requests:
            reason = f"{self.num_requests} requests are in flight, which is the limit"
            raise Overloaded(reason, self._delay_s(self._ends, 1.0), limit=OverloadLimit.REQUESTS)
        self.num_requests += 1
        self._ends.set_busy(True, self._clock())
        return AdmittedRequest(self)

    def queue(self, num_tokens: int, time_left_s: float | None) -> float:
        """Let an admitted request wait for this many tokens. Returns the time on the clock.

        AdmittedRequest calls this method. Raises Overloaded, DeadlineUnreachable.
        """
        waiting, now_s = self.num_waiting_tokens, self._clock()
        # A prompt that is larger than the limit has to be served too: when nothing else waits.
        if waiting and waiting + num_tokens > self._max_waiting_tokens:
            reason = f"{waiting} tokens of prompts wait, and no more than {self._max_waiting_tokens} may"
            delay_s = self._delay_s(self._prompts, waiting + num_tokens - self._max_waiting_tokens)
            raise Overloaded(reason, delay_s, limit=OverloadLimit.WAITING_TOKENS)
        expected_s = self.expected_wait_s(waiting + num_tokens)
        if time_left_s is not None and expected_s is not None and expected_s > _DOUBT * time_left_s:
            raise DeadlineUnreachable(time_left_s, expected_s)
        self.num_waiting_tokens += num_tokens
        self._prompts.set_busy(True, now_s)
        return now_s

    def begin(self, num_tokens: int, queued_at_s: float) -> None:
        """Note that an admitted request has its first token. AdmittedRequest calls this method."""
        now_s = self._clock()
        self._prompts.add(num_tokens, now_s)
        self._num_prompts += 1
        speed_per_s = num_tokens / max(1e-6, now_s - queued_at_s)
        # The highest rate is forgotten slowly: earlier prompts show what is possible.
        self._fastest_prompt_per_s = max(0.99 * self._fastest_prompt_per_s, speed_per_s)
        self.give_up(num_tokens)

    def give_up(self, num_tokens: int) -> None:
        """Note that an admitted request does not wait any more. AdmittedRequest calls this method."""
        self.num_waiting_tokens -= num_tokens
        self._prompts.set_busy(self.num_waiting_tokens > 0, self._clock())

    def leave(self) -> None:
        """Note that an admitted request has ended. AdmittedRequest calls this method."""
        now_s = self._clock()
        self.num_requests -= 1
        self._num_refused = max(0, self._num_refused - 1)
        self._ends.add(1.0, now_s)
        self._ends.set_busy(self.num_requests > 0, now_s)

    def expected_wait_s(self, num_tokens: int) -> float | None:
        """Estimate how many seconds it takes at least to compute this many prompt tokens.

        num_tokens: all prompt tokens that wait, and those of the request in question
        Returns None if too little is known: few prompts were observed, or the queue was empty a moment ago.
        """
        now_s = self._clock()
        per_s = self._prompts.per_s(now_s)
        has_waited = self.num_waiting_tokens > 0 and now_s - self._prompts.busy_since_s >= _MIN_EXPERIENCE_S
        if per_s is None or not has_waited or self._num_prompts < _MIN_NUM_PROMPTS:
            return None
        return num_tokens / max(per_s, self._fastest_prompt_per_s)

    def _delay_s(self, rate: DrainRate, amount: float) -> float:
        """Return in how many seconds this amount will have left, after the requests that were refused before."""
        per_s = rate.per_s(self._clock())
        if per_s is None:
            return self._unknown_delay_s
        self._num_refused += 1
        ahead_s = (
            0.0 if (ends_per_s := self._ends.per_s(self._clock())) is None else (self._num_refused - 1) / ends_per_s
        )
        return min(_MAX_DELAY_S, max(_MIN_DELAY_S, amount / per_s + ahead_s))
