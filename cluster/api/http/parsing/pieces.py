"""The pieces that parsers make of text, the interface of parsers, and the search for markers that all of them use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call; the arguments that follow belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the arguments of the call that has begun: JSON text, as the model writes it."""

    text: str


Piece: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class TextParser(Protocol):
    """A parser of one answer's text, which comes in parts."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        ...


class MarkerSearch:
    """Searches for the first of several markers in a text that comes in parts.

    Invariant: the text that is held back is the longest end of the text with which a marker could begin.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Take more text; return the text before the marker, the marker or None, and the text after the marker."""
        text = self._held + text
        found = [(start, -len(marker), marker) for marker in self._markers if (start := text.find(marker)) >= 0]
        if found:
            start, _, marker = min(found)
            self._held = ""
            return text[:start], marker, text[start + len(marker) :]
        num_held = max(_num_begun(text, marker) for marker in self._markers)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None, ""

    def flush(self) -> str:
        """Return the text that was held back, because no marker will follow."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of the text are the beginning of the marker, but not all of it."""
    for num_chars in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:num_chars]):
            return num_chars
    return 0


def content(text: str) -> list[Piece]:
    """Return text as a piece of content; no piece if it is empty."""
    return [Content(text)] if text else []


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces of one kind, so that the result does not depend on the parts in which the text came."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match last, piece:
            case Content(before), Content(after):
                result[-1] = Content(before + after)
            case Reasoning(before), Reasoning(after):
                result[-1] = Reasoning(before + after)
            case CallArguments(before), CallArguments(after):
                result[-1] = CallArguments(before + after)
            case _:
                result.append(piece)
    return result
