"""Parses tool calls of Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter>…</function>…"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from cluster.api.http.parsing.pieces import CallArguments, CallBegin, MarkerSearch, Piece, content
from cluster.parameters.json_types import JSON

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_TAG_END: Final = ">"


class _State(Enum):
    TEXT = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE = auto()


_MARKERS: Final = {
    _State.TEXT: (_CALL, _CALL_END, _FUNCTION),
    _State.NAME: (_TAG_END,),
    _State.BETWEEN: (_PARAMETER, _FUNCTION_END, _CALL_END),
    _State.KEY: (_TAG_END,),
    _State.VALUE: (_PARAMETER_END,),
}


class Qwen3CoderParser:
    """Parses calls and content. A parameter is returned when it is whole.

    The function's schema tells whether a parameter's value is a string or JSON.
    """

    def __init__(self, schemas: Mapping[str, JSON]) -> None:
        """Begin a text. schemas: the schema of each function's parameters, by the function's name"""
        self._schemas = schemas
        self._to(_State.TEXT)
        self._name = ""
        self._key = ""
        self._num_parameters = 0

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain by now."""
        pieces: list[Piece] = []
        while text:
            before, marker, text = self._search.push(text)
            if self._state is _State.TEXT:
                pieces.extend(content(before))
            else:
                self._text += before
            if marker is not None:
                pieces.extend(self._on_marker(marker))
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back. A call that was cut off has its whole parameters."""
        if self._state is _State.TEXT:
            return content(self._search.flush())
        if self._state is _State.NAME:
            return content(_FUNCTION + self._text + self._search.flush())
        return []

    def _to(self, state: _State) -> None:
        self._state, self._text = state, ""
        self._search = MarkerSearch(*_MARKERS[state])

    def _on_marker(self, marker: str) -> list[Piece]:
        text = self._text
        match marker:
            case "<function=":
                self._to(_State.NAME)
            case "<parameter=":
                self._to(_State.KEY)
            case ">" if self._state is _State.NAME:
                self._name, self._num_parameters = text.strip(), 0
                self._to(_State.BETWEEN)
                return [CallBegin(self._name)]
            case ">":
                self._key = text.strip()
                self._to(_State.VALUE)
            case "</parameter>":
                self._to(_State.BETWEEN)
                return [CallArguments(self._parameter(text))]
            case _ if self._state is _State.BETWEEN:
                self._to(_State.TEXT)
                return [CallArguments("}" if self._num_parameters else "{}")]
        return []

    def _parameter(self, text: str) -> str:
        separator = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        value = text.removeprefix("\n").removesuffix("\n")
        return f"{separator}{json.dumps(self._key, ensure_ascii=False)}: {self._as_json(value)}"

    def _as_json(self, value: str) -> str:
        match self._schemas.get(self._name):
            case {"properties": {self._key: {"type": "string"}}}:
                return json.dumps(value, ensure_ascii=False)
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        return value.strip()
