"""The times of an answer as its reader sees them. Pure: the clock's value is an argument."""

from __future__ import annotations


class Meter:
    """A measurement of one answer: TTFT, the time to the first token, and TPOT, the mean time per token after it."""

    def __init__(self, asked_s: float) -> None:
        """asked_s: when the question was sent, in seconds of the clock that count() gets"""
        self._asked_s = asked_s
        self._first_s: float | None = None
        self._last_s = asked_s
        self._num_tokens = 0

    def count(self, num_tokens: int, now_s: float) -> None:
        """Note that num_tokens tokens have arrived at now_s."""
        if not num_tokens:
            return
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s
        self._num_tokens += num_tokens

    def text(self) -> str:
        """Return the times so far, for people."""
        if self._first_s is None:
            return "no token yet"
        parts = [f"TTFT {1000 * (self._first_s - self._asked_s):.0f} ms"]
        if self._num_tokens > 1:
            parts.append(f"TPOT {1000 * (self._last_s - self._first_s) / (self._num_tokens - 1):.1f} ms")
        parts.append(f"{self._num_tokens} token{'s' * (self._num_tokens != 1)}")
        return " · ".join(parts)
