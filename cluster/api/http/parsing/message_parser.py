"""Parses one answer of a chat, from its text to the parts of its message."""

from __future__ import annotations

from cluster.api.http.parsing.json_calls import JsonCalls
from cluster.api.http.parsing.pieces import CallArguments, CallBegin, Content, Piece, TextParser, content, joined


class MessageParser:
    """Parses reasoning first, then tool calls and content. Either of the two parsers may be missing."""

    def __init__(self, reasoning: TextParser | None, calls: TextParser | None, *, max_calls: int | None = None) -> None:
        """Begin a text. max_calls: further tool calls are left out; None: no limit"""
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls
        self._gap = ""
        self._is_in_gap = True
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        pieces = content(text) if self._reasoning is None else self._reasoning.push(text)
        return joined(self._parse_calls(pieces))

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        pieces = self._parse_calls(self._reasoning.finish() if self._reasoning is not None else [])
        if self._calls is not None:
            pieces += self._count(self._calls.finish())
        # If the answer is whitespace alone and calls no tool, this whitespace is its content.
        pieces += content("" if self.num_calls else self._gap)
        return joined(pieces)

    def _parse_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        result: list[Piece] = []
        for piece in pieces:
            result += self._count(self._calls.push(piece.text)) if isinstance(piece, Content) else [piece]
        return result

    def _count(self, pieces: list[Piece]) -> list[Piece]:
        result: list[Piece] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    result += self._without_gap(text)
                case CallBegin() | CallArguments():
                    if isinstance(piece, CallBegin):
                        self.num_calls += 1
                        self._gap, self._is_in_gap = "", True
                    if self._max_calls is None or self.num_calls <= self._max_calls:
                        result.append(piece)
                case _:
                    result.append(piece)
        return result

    def _without_gap(self, text: str) -> list[Piece]:
        """Return text as content, without the spaces before, between and after calls."""
        if not self._is_in_gap:
            return [Content(text)]
        self._gap += text
        if not self._gap.strip():
            return []
        text, self._gap, self._is_in_gap = self._gap, "", False
        return [Content(text)]


class ForcedCallParser:
    """Parses an answer whose form makes it the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        if not text:
            return []
        begin: list[Piece] = [] if self._has_begun else [CallBegin(self._name)]
        self._has_begun = True
        return [*begin, CallArguments(text)]

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        return []


class RequiredCallsParser:
    """Parses an answer whose form makes it a JSON list of calls."""

    def __init__(self) -> None:
        self._list = JsonCalls()

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        pieces, rest = self._list.push(text)
        return pieces + content(rest)

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        return self._list.finish()
