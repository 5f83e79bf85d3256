"""Parsers of the tool calls of several models, by vLLM's names of these parsers."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from cluster.api.http.parsing.json_calls import JsonCall, JsonCalls, JsonValue
from cluster.api.http.parsing.pieces import CallArguments, CallBegin, MarkerSearch, Piece, content


class HermesParser:
    """Parses <tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes, Qwen 2.5, Qwen 3 and others write."""

    _BEGIN: Final = "<tool_call>"
    _END: Final = "</tool_call>"

    def __init__(self) -> None:
        self._search = MarkerSearch(self._BEGIN)
        self._call: JsonCall | None = None
        self._is_behind_call = False

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        pieces: list[Piece] = []
        while text:
            if self._call is not None:
                found, text = self._call.push(text)
                pieces.extend(found)
                if self._call.is_over:
                    self._is_behind_call = not self._call.is_broken
                    self._call = None
                    self._search = MarkerSearch(self._END if self._is_behind_call else self._BEGIN)
                continue
            before, marker, text = self._search.push(text)
            # Between the brace that ends a call and </tool_call> there are only line ends.
            if not self._is_behind_call:
                pieces.extend(content(before))
            if marker == self._BEGIN:
                self._call = JsonCall(self._BEGIN)
            elif marker == self._END:
                self._is_behind_call = False
                self._search = MarkerSearch(self._BEGIN)
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        if self._call is not None:
            return self._call.finish()
        return [] if self._is_behind_call else content(self._search.flush())


class Llama3JsonParser:
    """Parses {"name": …, "parameters": {…}}, one or several with `;` between them, as Llama 3.1 and 3.2 write.

    <|python_tag|> may stand before them. An answer that begins otherwise is text.
    """

    _TAG: Final = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._calls: JsonCalls | None = None
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        if self._is_text:
            return content(text)
        if self._calls is None:
            self._held += text
            begun = self._held.lstrip()
            if begun == "" or (self._TAG.startswith(begun) and begun != self._TAG):
                return []
            text = begun.removeprefix(self._TAG).lstrip()
            if text == "":
                return []
            if not text.startswith("{"):
                self._is_text = True
                return content(self._held)
            self._calls = JsonCalls()
        pieces, rest = self._calls.push(text)
        if self._calls.is_over:
            self._is_text = True
            pieces.extend(content(rest))
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        if self._is_text:
            return []
        return content(self._held) if self._calls is None else self._calls.finish()


class MistralParser:
    """Parses Mistral's calls: [TOOL_CALLS] and a JSON list; or, since v11, [TOOL_CALLS]name{…} for each call.

    [ARGS] may stand between a name and its arguments.
    """

    _BEGIN: Final = "[TOOL_CALLS]"
    _BRACE: Final = "{"
    _ARGS: Final = "[ARGS]"
    _CALL_ID: Final = "[CALL_ID]"

    class _State(Enum):
        TEXT = auto()
        MARKED = auto()
        LIST = auto()
        NAME = auto()
        ARGUMENTS = auto()

    def __init__(self) -> None:
        self._state = self._State.TEXT
        self._search = MarkerSearch(self._BEGIN)
        self._list = JsonCalls()
        self._name: list[str] = []
        self._arguments = JsonValue()

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        pieces: list[Piece] = []
        while text:
            text = self._take(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        match self._state:
            case self._State.TEXT:
                return content(self._search.flush())
            case self._State.MARKED:
                return content(self._BEGIN)
            case self._State.LIST:
                return self._list.finish()
            case self._State.NAME:
                return content(self._BEGIN + "".join(self._name) + self._search.flush())
            case _:
                return []

    def _take(self, text: str, pieces: list[Piece]) -> str:
        match self._state:
            case self._State.TEXT:
                before, marker, text = self._search.push(text)
                pieces.extend(content(before))
                if marker is not None:
                    self._state = self._State.MARKED
                return text
            case self._State.MARKED:
                return self._after_marker(text)
            case self._State.LIST:
                found, text = self._list.push(text)
                pieces.extend(found)
                if self._list.is_over:
                    self._to_text()
                return text
            case self._State.NAME:
                return self._take_name(text, pieces)
            case _:
                return self._take_arguments(text, pieces)

    def _to_text(self) -> None:
        self._state, self._search = self._State.TEXT, MarkerSearch(self._BEGIN)

    def _after_marker(self, text: str) -> str:
        text = text.lstrip()
        if text == "":
            return text
        if text[0] in "[{":
            self._state, self._list = self._State.LIST, JsonCalls(self._BEGIN)
        else:
            self._state, self._name = self._State.NAME, []
            self._search = MarkerSearch(self._ARGS, self._CALL_ID, self._BRACE)
        return text

    def _take_name(self, text: str, pieces: list[Piece]) -> str:
        before, marker, text = self._search.push(text)
        self._name.append(before)
        if marker == self._CALL_ID:
            # An id follows, which must not become part of the name.
            self._name.append(marker)
        elif marker is not None:
            name = "".join(self._name).partition(self._CALL_ID)[0].strip()
            pieces.append(CallBegin(name))
            self._state, self._arguments = self._State.ARGUMENTS, JsonValue()
            return text if marker == self._ARGS else marker + text
        return text

    def _take_arguments(self, text: str, pieces: list[Piece]) -> str:
        num_taken = 0
        while num_taken < len(text) and self._arguments.takes(text[num_taken]):
            num_taken += 1
        if num_taken:
            pieces.append(CallArguments(text[:num_taken]))
        if num_taken < len(text):
            self._to_text()
        return text[num_taken:]
