"""A body with too many entries is refused by their count, with the field that has them.

Tests of cluster/api/http/receiving/reading.py, cluster/api/http/requests.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.api.http.receiving.body_counts import MAX_DEPTH, check_counts
from cluster.api.http.receiving.reading import read_body
from cluster.api.http.requests import (
    Body,
    ChatCompletionRequest,
    ClassifyBody,
    CompletionRequest,
    EmbeddingRequest,
    RerankBody,
    ScoreBody,
    TokenizeRequest,
)
from cluster.errors import InvalidRequest
from cluster.settings.input_limits import InputLimits

_LIMITS = InputLimits(
    max_samples_per_call=2, max_inputs=2, max_chat_messages=2, max_grammar_chars=100, max_prompt_chars=100
)
_HI = {"role": "user", "content": "hi"}


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


def _calls(arguments: str, count: int = 1) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call] * count}


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("kind", "fine", "too_much", "field"),
    [
        (CompletionRequest, {"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt"),
        (CompletionRequest, {"prompt": [1, 2, 3]}, {"prompt": [[1], [2], [3]]}, "prompt"),
        (EmbeddingRequest, {"input": [[1], [2]]}, {"input": ["a"] * 3}, "input"),
        (ClassifyBody, {"input": "abc"}, {"input": [[]] * 3}, "input"),
        (ScoreBody, {"text_1": "a", "text_2": ["a"] * 2}, {"text_1": "a", "text_2": ["a"] * 3}, "text_2"),
        (ScoreBody, {"text_1": ["a"] * 2, "text_2": "a"}, {"text_1": ["a"] * 3, "text_2": "a"}, "text_1"),
        (RerankBody, {"query": "a", "documents": ["a"] * 2}, {"query": "a", "documents": ["a"] * 3}, "documents"),
        (ChatCompletionRequest, {"messages": [_HI] * 2}, {"messages": [_HI] * 3}, "messages"),
        (TokenizeRequest, {"messages": [_HI] * 2}, {"messages": [_HI] * 3}, "messages"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}]},
            "messages",
        ),
        (ChatCompletionRequest, {"messages": [_calls("{}", 2)]}, {"messages": [_calls("{}", 3)]}, "messages"),
        (ChatCompletionRequest, {"messages": [_calls("a" * 100)]}, {"messages": [_calls("a" * 101)]}, "messages"),
        (
            ChatCompletionRequest,
            {"messages": [_HI], "tools": [_tool({"a": [1] * 60_000})]},
            {"messages": [_HI], "tools": [_tool({"a": [1] * 70_000})]},
            "tools",
        ),
        (
            ChatCompletionRequest,
            {"messages": [_HI], "tools": [_tool(_deep(MAX_DEPTH - 10))]},
            {"messages": [_HI], "tools": [_tool(_deep(MAX_DEPTH))]},
            "tools",
        ),
        (
            ChatCompletionRequest,
            {"messages": [_HI], "chat_template_kwargs": _deep(MAX_DEPTH - 10)},
            {"messages": [_HI], "chat_template_kwargs": _deep(MAX_DEPTH)},
            "chat_template_kwargs",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "guided_json": {"a": "b" * 80}},
            {"prompt": "a", "guided_json": {"a": "b" * 101}},
            "guided_json",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "structured_outputs": {"choice": ["a"] * 30}},
            {"prompt": "a", "structured_outputs": {"choice": ["a"] * 60}},
            "structured_outputs.choice",
        ),
    ],
)
def test_one_too_many_is_refused_by_its_field(
    kind: type[Body], fine: dict[str, Any], too_much: dict[str, Any], field: str
) -> None:
    check_counts(_read(kind, fine), _LIMITS)
    with pytest.raises(InvalidRequest) as refused:
        check_counts(_read(kind, too_much), _LIMITS)
    assert refused.value.violations[0].field == field


def test_arguments_of_calls_have_as_few_values_as_other_json() -> None:
    limits = InputLimits()
    check_counts(_read(ChatCompletionRequest, {"messages": [_calls('{"a":[' + "1," * 100_000 + "1]}")]}), limits)
    with pytest.raises(InvalidRequest, match="commas and brackets"):
        check_counts(_read(ChatCompletionRequest, {"messages": [_calls('{"a":[' + "1," * 140_000 + "1]}")]}), limits)


def _read(kind: type[Body], body: dict[str, Any]) -> Body:
    return asyncio.run(read_body(kind, json.dumps(body).encode()))
