"""Converts OpenAI's messages and tools to the conversation that a chat template renders."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence

from cluster.api.http.requests import (
    ChatCompletionRequest,
    ImagePart,
    Message,
    TextPart,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import ChatMessage, ChatPrompt, ImageInput
from cluster.parameters.json_types import JSON


def chat_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    """Return the conversation of a chat completion. It has no tools if the model must not call any."""
    tools = () if body.tool_choice == "none" else body.tools or ()
    variables: dict[str, JSON] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents is not None:
        variables.setdefault("documents", [dict(document) for document in body.documents])
    return _prompt(body, body.messages, tools, variables)


def prompt_to_tokenize(body: TokenizeRequest, messages: Sequence[Message]) -> ChatPrompt:
    """Return the conversation of a call to /tokenize."""
    return _prompt(body, messages, body.tools or (), dict(body.chat_template_kwargs or {}))


def _prompt(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    variables: dict[str, JSON],
) -> ChatPrompt:
    if body.continue_final_message:
        variables |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    shown: list[JSON] = [tool.model_dump(exclude_unset=True) for tool in tools]
    return ChatPrompt([_message(message) for message in messages], shown, variables)


def _message(message: Message) -> ChatMessage:
    text, parts = _content(message)
    # Chat templates know the role "system"; "developer" is OpenAI's newer name of the same role.
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, JSON] = {}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return ChatMessage(role, text, fields, parts)


def _content(message: Message) -> tuple[str, list[str | ImageInput]]:
    """Return a message's text, or its texts and images if it has images."""
    content = message.content or ""
    if isinstance(content, str):
        return content, []
    if any(isinstance(part, ImagePart) for part in content):
        return "", [part.text if isinstance(part, TextPart) else _image(part) for part in content]
    return "\n".join(part.text for part in content if isinstance(part, TextPart)), []


def _image(part: ImagePart) -> ImageInput:
    url = part.image_url.url
    if not url.startswith("data:"):
        raise InvalidRequest(FieldViolation("messages", reprlib.repr(url), "a data URI: no image is fetched from here"))
    return ImageInput(data_uri=url)


def _tool_call(call: ToolCall) -> JSON:
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(text: str) -> JSON:
    """Return a call's arguments as an object, over which templates iterate; unchanged if they are no JSON object."""
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
