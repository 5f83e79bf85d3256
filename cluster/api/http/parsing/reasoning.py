"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from enum import Enum, auto

from cluster.api.http.parsing.pieces import Content, MarkerSearch, Piece, Reasoning


class _State(Enum):
    BEGIN = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Parses text that begins with reasoning between two markers. Line ends beside the markers are dropped."""

    def __init__(self, begin: str, end: str, *, has_begun: bool) -> None:
        """Begin a text. begin, end: the markers; has_begun: whether the prompt ends with the first marker already"""
        self._begin = begin
        self._search = MarkerSearch(end)
        self._state = _State.BEGIN
        self._has_begun = has_begun
        self._held = ""
        self._is_at_line_ends = True

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        if self._state is _State.BEGIN:
            text = self._find_begin(text)
        if self._state is _State.ANSWER:
            return self._answer(text)
        if self._state is _State.BEGIN:
            return []
        before, marker, text = self._search.push(text)
        pieces = self._reasoning(before, is_last=marker is not None)
        if marker is not None:
            self._state, self._is_at_line_ends = _State.ANSWER, True
            pieces += self._answer(text)
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        if self._state is _State.BEGIN:
            return [Reasoning(self._held) if self._has_begun else Content(self._held)] if self._held else []
        if self._state is _State.REASONING:
            rest = self._held + self._search.flush()
            return [Reasoning(rest)] if rest else []
        return []

    def _find_begin(self, text: str) -> str:
        """Return the text for the next state; none while the text so far may be the beginning of the first marker."""
        self._held += text
        text = self._held.lstrip()
        if len(text) < len(self._begin) and self._begin.startswith(text):
            return ""
        held, self._held = self._held, ""
        if text.startswith(self._begin):
            self._state = _State.REASONING
            return text.removeprefix(self._begin)
        self._state = _State.REASONING if self._has_begun else _State.ANSWER
        # An answer without reasoning keeps the line ends with which it begins.
        self._is_at_line_ends = self._has_begun
        return held

    def _reasoning(self, text: str, *, is_last: bool) -> list[Piece]:
        text = self._held + self._past_line_ends(text)
        stripped = text.rstrip("\n")
        self._held = "" if is_last else text[len(stripped) :]
        return [Reasoning(stripped)] if stripped else []

    def _answer(self, text: str) -> list[Piece]:
        text = self._past_line_ends(text)
        return [Content(text)] if text else []

    def _past_line_ends(self, text: str) -> str:
        if self._is_at_line_ends:
            text = text.lstrip("\n")
            self._is_at_line_ends = text == ""
        return text
