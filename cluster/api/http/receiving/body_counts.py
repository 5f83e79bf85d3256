"""Checks the lengths of a body's lists, before anything is made of their entries."""

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
"""The most images of a request, whatever the cluster's own limit is."""
MAX_ARGUMENTS: Final = 1 << 17
"""The most commas and opening brackets in all arguments of a conversation's calls, which bound their JSON values."""
MAX_VALUES: Final = 1 << 16
"""The most JSON values of tools, documents and variables of a chat template together."""
MAX_DEPTH: Final = 200
"""The most JSON values inside each other: the functions that write and render them call themselves for each."""


def check_counts(body: Body, limits: InputLimits) -> None:
    """Check the lists of a body by the cluster's limits. Raises InvalidRequest."""
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
    """Check the arguments of tool calls: JSON texts, which are parsed and given to templates as objects."""
    texts = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    _require("messages", sum(map(len, texts)), limits.max_prompt_chars, "characters of arguments")
    # Characters within JSON strings are counted too, so this is an upper bound on the number of entries.
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
    """Check the lengths of schemas and choices, without writing them as JSON first."""
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
    """Whether a value's JSON certainly has more characters than `most`."""
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
