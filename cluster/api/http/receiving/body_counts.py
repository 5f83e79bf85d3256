"""What is refused by its count alone, before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from pydantic import JsonValue

from cluster.api.http.requests import (
    Body,
    ChatCompletionRequest,
    ClassifyBody,
    CompletionRequest,
    EmbeddingRequest,
    GenerationBody,
    ImagePart,
    JsonSchemaFormat,
    Message,
    RerankBody,
    ScoreBody,
    TokenizeRequest,
    Tool,
)
from cluster.errors import FieldViolation, InvalidRequest
from cluster.settings.input_limits import InputLimits

MAX_IMAGES: Final = 1024
"""However many are allowed."""
MAX_ARGUMENTS: Final = 1 << 17
"""Commas and opening brackets of all arguments of a conversation's calls: as many values as these can have."""
MAX_VALUES: Final = 1 << 16
"""JSON values that tools, documents and variables of a chat template have in all."""
MAX_DEPTH: Final = 200
"""Values of JSON that are inside each other: what writes and renders them calls itself for each."""


def check_counts(body: Body, limits: InputLimits) -> None:
    """Raises InvalidRequest."""
    match body:
        case CompletionRequest(prompt=prompts):
            _check_list("prompt", prompts, limits.max_samples_per_call, "prompts")
        case ChatCompletionRequest() | TokenizeRequest():
            _check_messages(body.messages or (), limits)
            documents = (body.documents or ()) if isinstance(body, ChatCompletionRequest) else ()
            _check_values(body.tools or (), body.chat_template_kwargs or {}, documents)
        case EmbeddingRequest(input=inputs) | ClassifyBody(input=inputs):
            _check_list("input", inputs, limits.max_inputs, "inputs")
        case ScoreBody(text_1=first, text_2=second):
            _check_list("text_1", first, limits.max_inputs, "texts")
            _check_list("text_2", second, limits.max_inputs, "texts")
        case RerankBody(documents=documents):
            _check_list("documents", documents, limits.max_inputs, "documents")
    if isinstance(body, GenerationBody):
        _check_forms(body, limits)


def _check_list(field: str, value: str | Sequence[object], most: int, what: str) -> None:
    # A list of tokens is one prompt.
    if not isinstance(value, str) and value and not isinstance(value[0], int):
        _require(field, len(value), most, what)


def _check_messages(messages: Sequence[Message], limits: InputLimits) -> None:
    most = limits.max_chat_messages
    _require("messages", len(messages), most, "messages")
    parts = [message.content for message in messages if isinstance(message.content, list)]
    _require("messages", sum(map(len, parts)), most, "parts of messages")
    _require("messages", sum(len(message.tool_calls or ()) for message in messages), most, "tool calls")
    _check_arguments(messages, limits)
    num_images = sum(isinstance(part, ImagePart) for content in parts for part in content)
    _require("messages", num_images, MAX_IMAGES, "images")


def _check_arguments(messages: Sequence[Message], limits: InputLimits) -> None:
    """The arguments of calls are JSON of their own, which templates are given as objects."""
    texts = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    _require("messages", sum(map(len, texts)), limits.max_prompt_chars, "characters of arguments")
    # At least as many as there are: those within strings count, too.
    num_entries = sum(text.count(character) for text in texts for character in ",[{")
    _require("messages", num_entries, MAX_ARGUMENTS, "commas and brackets of arguments")


def _check_values(tools: Sequence[Tool], variables: JsonValue, documents: Sequence[object]) -> None:
    parameters: list[object] = [tool.function.parameters for tool in tools]
    num_values = len(tools) + len(documents)
    for field, value in (("tools", parameters), ("chat_template_kwargs", variables)):
        num_values += sum(1 for _ in islice(_values_in(field, value), MAX_VALUES + 1))
        if num_values > MAX_VALUES:
            what = "values, those of tools, documents and chat_template_kwargs together"
            raise InvalidRequest(FieldViolation(field, f"more than {MAX_VALUES} {what}", f"at most {MAX_VALUES}"))


def _check_forms(body: GenerationBody, limits: InputLimits) -> None:
    """A schema that is too long is not written as JSON to find that out."""
    wanted: list[tuple[str, object]] = [("guided_json", body.guided_json), ("guided_choice", body.guided_choice)]
    if isinstance(body.response_format, JsonSchemaFormat):
        wanted.append(("response_format", body.response_format.json_schema.json_schema))
    if (structured := body.structured_outputs) is not None:
        wanted += [("structured_outputs.json", structured.json_), ("structured_outputs.choice", structured.choice)]
    for field, value in wanted:
        if not isinstance(value, str) and _has_more_chars(field, value, limits.max_grammar_chars):
            allowed = f"at most {limits.max_grammar_chars} characters"
            raise InvalidRequest(FieldViolation(field, f"longer than {limits.max_grammar_chars} characters", allowed))


def _values_in(field: str, value: object) -> Iterator[object]:
    """Yield a JSON value and all values inside it, one after the other, so that a count can stop.

    Raises InvalidRequest if they are too deep inside each other.
    """
    waiting = [iter((value,))]
    while waiting:
        if len(waiting) > MAX_DEPTH:
            raise InvalidRequest(FieldViolation(field, "too deep", f"at most {MAX_DEPTH} values inside each other"))
        for one in waiting[-1]:
            yield one
            if isinstance(one, dict):
                waiting.append(iter(one.values()))
                break
            if isinstance(one, list):
                waiting.append(iter(one))
                break
        else:
            waiting.pop()


def _has_more_chars(field: str, value: object, most: int) -> bool:
    """Whether a value's JSON has certainly more characters than these."""
    num_chars = 0
    for one in _values_in(field, value):
        num_chars += 1 + len(one) if isinstance(one, str) else 1
        if isinstance(one, dict):
            num_chars += sum(map(len, one))
        if num_chars > most:
            return True
    return False


def _require(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequest(FieldViolation(field, f"{count} {what}", f"at most {most} {what}"))
