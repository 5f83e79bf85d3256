"""Parses tool calls that are written as JSON, character by character: {"name": "f", "arguments": {…}}."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Final

from cluster.api.http.parsing.pieces import CallArguments, CallBegin, Piece, content

_SPACE: Final = " \t\r\n"
_NO_VALUE: Final = ",:]}"
_BEHIND_VALUE: Final = _NO_VALUE + _SPACE
_ARGUMENTS: Final = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one JSON value by its quotes and brackets; it does not check what is between these."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_begun = False
        self._is_closed = False

    def takes(self, char: str) -> bool:
        """Take the next character; return whether it belongs to the value. False: the value ended before it."""
        if self._is_closed:
            return False
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
                self._is_closed = self._depth == 0
            return True
        if char in _SPACE and not self._has_begun:
            return True
        if self._depth == 0 and char in (_BEHIND_VALUE if self._has_begun else _NO_VALUE):
            return False
        self._has_begun = True
        if char == '"':
            self._is_in_string = True
        elif char in "[{":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
            self._is_closed = self._depth == 0
        return True


class _State(Enum):
    BEGIN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """Parses the object of one call. Once the name is known, arguments are returned as they come.

    Text that turns out to be no call is returned as content, unless a part of it was returned as a call before.
    """

    def __init__(self, marker: str = "") -> None:
        """Begin an object. marker: the marker before it, which is returned with text that is no call"""
        self._state = _State.BEGIN
        self._raw = [marker]
        self._key = ""
        self._value = JsonValue()
        self._text: list[str] = []
        self._name: str | None = None
        self._early_arguments: str | None = None
        self._has_arguments = False
        self._has_begun = False

    @property
    def is_over(self) -> bool:
        """Whether the object has ended, so that it takes no more characters."""
        return self._state in (_State.DONE, _State.BROKEN)

    @property
    def is_broken(self) -> bool:
        """Whether the text was no call."""
        return self._state is _State.BROKEN

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Take text up to the end of the object; return what is certain, and the text that is left."""
        pieces: list[Piece] = []
        for index, char in enumerate(text):
            if self.is_over:
                return pieces, text[index:]
            if not self._has_begun:
                self._raw.append(char)
            self._take(char, pieces)
        return pieces, ""

    def finish(self) -> list[Piece]:
        """End the text in the middle of the object; return it as content, unless a part was returned as a call."""
        if self.is_over or self._has_begun:
            return []
        self._state = _State.BROKEN
        return content("".join(self._raw))

    def _take(self, char: str, pieces: list[Piece]) -> None:
        match self._state:
            case _State.BEGIN if char == "{":
                self._begin(_State.KEY)
            case _State.COLON if char == ":":
                self._begin(_State.VALUE)
            case _State.NEXT if char == ",":
                self._begin(_State.KEY)
            case _State.NEXT | _State.KEY if char == "}" and not self._text:
                self._end(pieces)
            case _State.KEY | _State.VALUE if self._text or char not in _SPACE:
                self._take_part(char, pieces)
            case _ if char in _SPACE:
                pass
            case _:
                self._break(pieces)

    def _begin(self, state: _State) -> None:
        self._state, self._text, self._value = state, [], JsonValue()

    def _take_part(self, char: str, pieces: list[Piece]) -> None:
        """Take a character of a key or of a value, or the first one after it."""
        if self._value.takes(char):
            self._text.append(char)
            if self._is_passing_on:
                pieces.append(CallArguments(char))
            return
        text, self._text = "".join(self._text), []
        if self._state is _State.KEY:
            self._state, self._key = _State.COLON, text.strip('"')
        else:
            self._state = _State.NEXT
            self._take_value(text, pieces)
        if not self.is_over:
            self._take(char, pieces)

    @property
    def _is_passing_on(self) -> bool:
        # The arguments may be a string that contains their JSON: it is decoded when it is whole.
        is_arguments = self._state is _State.VALUE and self._key in _ARGUMENTS
        return is_arguments and self._has_begun and self._text[0] != '"'

    def _take_value(self, text: str, pieces: list[Piece]) -> None:
        if self._key == "name":
            name = _string(text)
            if not name or self._name is not None:
                self._break(pieces)
                return
            self._name = name
            pieces.append(CallBegin(name))
            self._has_begun = True
            if self._early_arguments is not None:
                pieces.append(CallArguments(self._early_arguments))
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            unpacked = _string(text) if text.startswith('"') else text
            if not self._has_begun:
                self._early_arguments = unpacked
            elif text.startswith('"'):
                pieces.append(CallArguments(unpacked or ""))

    def _end(self, pieces: list[Piece]) -> None:
        if self._has_begun:
            self._state = _State.DONE
            if not self._has_arguments:
                pieces.append(CallArguments("{}"))
        else:
            self._break(pieces)

    def _break(self, pieces: list[Piece]) -> None:
        self._state = _State.BROKEN
        if not self._has_begun:
            pieces.extend(content("".join(self._raw)))


class JsonCalls:
    """Parses a list of calls in brackets, or calls with `;` between them and no brackets."""

    def __init__(self, marker: str = "") -> None:
        """Begin a list. marker: the marker before it, which is returned with text that is no call"""
        self._marker = marker
        self._call: JsonCall | None = None
        self._is_list: bool | None = None
        self.is_over = False
        """Whether the list has ended; the text after it is not parsed here."""

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Take text up to the end of the list; return what is certain, and the text that is left."""
        pieces: list[Piece] = []
        while text and not self.is_over:
            if self._call is not None:
                found, text = self._call.push(text)
                pieces.extend(found)
                if self._call.is_over:
                    self.is_over = self._call.is_broken
                    self._call = None
                continue
            char = text[0]
            if char == "[" and self._is_list is None:
                self._is_list = True
            elif char == "{":
                self._is_list = bool(self._is_list)
                self._call, self._marker = JsonCall(self._marker), ""
                continue
            elif char == "]" and self._is_list:
                self.is_over = True
            elif char not in _SPACE + ",;":
                self.is_over = True
                pieces.extend(content(self._marker))
                continue
            if self._marker:
                self._marker += char
            text = text[1:]
        return pieces, text

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        return self._call.finish() if self._call is not None else []


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
