"""The tools that a model may call, or has to call, and the parsers of its answer."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Final

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.api.http.parsing.message_parser import ForcedCallParser, MessageParser, RequiredCallsParser
from cluster.api.http.parsing.pieces import TextParser
from cluster.api.http.parsing.qwen3_coder import Qwen3CoderParser
from cluster.api.http.parsing.reasoning import ReasoningParser
from cluster.api.http.parsing.tool_calls import HermesParser, Llama3JsonParser, MistralParser
from cluster.api.http.requests import ChatCompletionRequest, NamedToolChoice, Tool
from cluster.api.http.sampling import OutputForm
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.json_types import JSON
from cluster.settings.http import HttpConfig, ReasoningParserName, ToolParserName

_NO_PARAMETERS: Final[dict[str, JSON]] = {"type": "object", "properties": {}}
_DEFINITIONS: Final = ("$defs", "definitions")
_THINK: Final = ("<think>", "</think>")
_MISTRAL_THINK: Final = ("[THINK]", "[/THINK]")


class ToolUse:
    """The tools of one request: their checks, the form that forced calls need, and the parsers."""

    def __init__(self, body: ChatCompletionRequest, form: OutputForm | None, config: HttpConfig) -> None:
        """Check the tools of a request. form: the form of the output that it asks for. Raises InvalidRequest."""
        self._body = body
        self._config = config
        self._tools = {tool.function.name: tool for tool in body.tools or ()}
        self._choice = body.tool_choice or ("auto" if self._tools else "none")
        self._check(form)
        self.form = form if form is not None else self._forced_form()
        """The form that the output has to have: the request's own, or the one that makes it call a tool."""

    @property
    def is_named(self) -> bool:
        """Whether the request names the function that the model has to call."""
        return isinstance(self._choice, NamedToolChoice)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a parser looks for markers that are special tokens in many tokenizers."""
        is_marked = self._reasoning_name == "mistral"
        return is_marked or (self.form is None and self._choice == "auto")

    def parser(self) -> MessageParser | None:
        """Return a parser for one choice; None: the choice's text is its content."""
        reasoning, calls = self._reasoning_parser(), self._calls_parser()
        if reasoning is None and calls is None:
            return None
        max_calls = 1 if self._body.parallel_tool_calls is False else None
        return MessageParser(reasoning, calls, max_calls=max_calls)

    def _check(self, form: OutputForm | None) -> None:
        choice, tools = self._choice, self._tools
        if len(tools) < len(self._body.tools or ()):
            raise InvalidRequest(FieldViolation("tools", "two of one name", "functions of different names"))
        if choice == "none":
            return
        if not tools:
            raise InvalidRequest(FieldViolation("tools", "empty", "at least one, or no tool_choice"))
        if isinstance(choice, NamedToolChoice) and choice.function.name not in tools:
            names = reprlib.repr(list(tools))
            raise InvalidRequest(FieldViolation("tool_choice", choice.function.name, f"one of the tools: {names}"))
        if choice != "auto" and form is not None:
            raise InvalidRequest(FieldViolation("tool_choice", "given", f"none, or auto, beside {form.parameter}"))
        if choice == "auto" and form is None and self._config.tool_parser is None:
            allowed = "none, required or a named function: this cluster was not told how its model writes tool calls "
            allowed += "(ingress.http.tool_parser)"
            raise InvalidRequest(FieldViolation("tool_choice", "auto", allowed))

    def _forced_form(self) -> OutputForm | None:
        match self._choice:
            case NamedToolChoice(function=function):
                schema: JSON = self._tools[function.name].function.parameters or _NO_PARAMETERS
            case "required":
                schema = _any_calls(list(self._tools.values()), is_one=self._body.parallel_tool_calls is False)
            case _:
                return None
        return OutputForm(StructuredOutputParams("json_schema", json.dumps(schema, ensure_ascii=False)), "tools")

    @property
    def _reasoning_name(self) -> ReasoningParserName | None:
        # Constrained output follows its grammar from the first token on, so no reasoning comes before it.
        return None if self.form is not None else self._config.reasoning_parser

    def _reasoning_parser(self) -> TextParser | None:
        options = self._body.chat_template_kwargs or {}
        is_off = options.get("enable_thinking") is False or options.get("thinking") is False
        match self._reasoning_name:
            case None:
                return None
            case "mistral":
                return ReasoningParser(*_MISTRAL_THINK, has_begun=False)
            case "qwen3":
                return ReasoningParser(*_THINK, has_begun=False)
            case "deepseek_r1":
                return ReasoningParser(*_THINK, has_begun=not is_off)

    def _calls_parser(self) -> TextParser | None:
        match self._choice:
            case NamedToolChoice(function=function):
                return ForcedCallParser(function.name)
            case "required":
                return RequiredCallsParser()
            case "auto" if self.form is None:
                name: ToolParserName | None = self._config.tool_parser
                schemas = {name: tool.function.parameters for name, tool in self._tools.items()}
                match name:
                    case "hermes":
                        return HermesParser()
                    case "llama3_json":
                        return Llama3JsonParser()
                    case "mistral":
                        return MistralParser()
                    case "qwen3_coder":
                        return Qwen3CoderParser(schemas)
        return None


def _any_calls(tools: Sequence[Tool], *, is_one: bool) -> JSON:
    """Return a schema of a list of calls of these tools. is_one: whether the list has a single call"""
    definitions: dict[str, JSON] = {}
    calls: list[JSON] = []
    for index, tool in enumerate(tools):
        parameters = _moved(tool.function.parameters or _NO_PARAMETERS, f"tool{index}_", definitions)
        properties: dict[str, JSON] = {"name": {"const": tool.function.name}, "parameters": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    items: JSON = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema: dict[str, JSON] = {"type": "array", "minItems": 1, "items": items}
    if is_one:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _moved(schema: dict[str, JSON], prefix: str, definitions: dict[str, JSON]) -> JSON:
    """Return a schema for use inside another one: its definitions move to `definitions`, their names with a prefix."""
    for key in _DEFINITIONS:
        defined = schema.get(key)
        if isinstance(defined, dict):
            definitions.update({prefix + name: _with_refs(value, prefix) for name, value in defined.items()})
    return _with_refs({key: value for key, value in schema.items() if key not in _DEFINITIONS}, prefix)


def _with_refs(schema: JSON, prefix: str) -> JSON:
    match schema:
        case dict():
            moved = {key: _with_refs(value, prefix) for key, value in schema.items()}
            reference = schema.get("$ref")
            if isinstance(reference, str):
                for key in _DEFINITIONS:
                    start = f"#/{key}/"
                    if reference.startswith(start):
                        moved["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(start)}"
            return moved
        case list():
            return [_with_refs(value, prefix) for value in schema]
        case _:
            return schema
