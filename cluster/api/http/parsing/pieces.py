"""What parsers make of text, and what each of them needs."""

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
    """Text that leads there."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; the arguments that follow are its."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that has begun: JSON, as the model writes it."""

    text: str


Piece: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class TextParser(Protocol):
    """One answer's text, as it comes."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """The text ends here: return what was held back."""
        ...


class MarkerSearch:
    """Looks for the first of some markers in text that comes in pieces.

    Invariant: what is held back is the longest end of the text that a marker begins with.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """The text before the marker, the marker if it is there, and what follows it."""
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
        """What was held back: no marker will come."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, marker: str) -> int:
    """How many characters at the end of text are the beginning of marker."""
    for num_chars in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:num_chars]):
            return num_chars
    return 0


def content(text: str) -> list[Piece]:
    """A piece of it, if there is any."""
    return [Content(text)] if text else []


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind in one: what is the same however the text came."""
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
