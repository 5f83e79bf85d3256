"""Finds stop strings in text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string.

    Invariant: the text that is held back is the longest end of the text so far with which a stop string starts. So it
    is shorter than the longest stop string, and text that was returned can never become part of a match.
    The match is the one that ends first (of those, the longest), in whatever pieces the text comes.
    """

    def __init__(self, stop: Sequence[str], *, include_in_text: bool) -> None:
        self._stop = tuple(stop)
        self._include_in_text = include_in_text
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return the text that may be sent. After a match this is always empty."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include_in_text else start]
        num_held = max(_num_started(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """End the output; return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _num_started(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the start of a stop string, but not all of it."""
    for num_chars in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:num_chars]):
            return num_chars
    return 0
