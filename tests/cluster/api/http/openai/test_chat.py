"""/v1/chat/completions as OpenAI's client sees it.

Tests of cluster/api/http/openai/chat_prompt.py, cluster/api/http/openai/tools.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.api.http.openai.chat_prompt import chat_prompt
from cluster.api.http.requests import ChatCompletionRequest
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import http_setup
from tests.cluster.serving_setup import assert_nothing_is_left

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
F: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "$defs": {"A": {"type": "integer"}},
        },
    },
}
G: ChatCompletionToolParam = {"type": "function", "function": {"name": "g"}}
HERMES = HttpConfig(tool_parser="hermes")
CALL = 'Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def test_an_answer_is_a_message() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=9)
        )
        request = await setup.answer("Hello")
        completion = await asking

    [choice] = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert choice.message.tool_calls is None
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6
    assert bytes(request.prompt_token_ids) == b"<user>hi"
    assert request.sampling_params.max_tokens == 9
    assert_nothing_is_left(setup.pair)


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(
                model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
            )
        )
        await setup.answer("Hello", FinishReason.LENGTH)
        *chunks, last = [chunk async for chunk in await asking]

    deltas = [
        (choice.delta.model_dump(exclude_unset=True), choice.finish_reason) for c in chunks for choice in c.choices
    ]
    assert deltas == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "H"}, None),
        ({"content": "ello"}, None),
        ({}, "length"),
    ]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == len("<user>hi") + 5


async def test_what_asks_for_nothing_else_is_accepted() -> None:
    same: dict[str, Any] = {
        "modalities": ["text"],
        "store": False,
        "user": "u",
        "metadata": {"a": "b"},
        "prompt_cache_retention": "24h",
        "audio": None,
        "functions": None,
        "echo": False,
        "add_special_tokens": False,
        "length_penalty": 1.0,
        "truncation_side": "left",
        "logits_processors": None,
        "chat_template": None,
    }
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.chat.completions.create(model="tiny", messages=HI, extra_body=same))
        request = await setup.answer("Hello")
        await asking
    assert bytes(request.prompt_token_ids) == b"<user>hi"


async def test_a_conversation_can_be_cut() -> None:
    cut: dict[str, Any] = {"truncate_prompt_tokens": 4, "add_special_tokens": True}
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.chat.completions.create(model="tiny", messages=HI, extra_body=cut))
        request = await setup.answer("Hello")
        completion = await asking
    assert bytes(request.prompt_token_ids) == b"r>hi"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 4


async def test_every_chunk_can_have_the_usage_so_far() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options)
        )
        await setup.answer("abc", FinishReason.LENGTH)
        usages = [chunk.usage async for chunk in await asking]
    counts = [(usage.prompt_tokens, usage.completion_tokens) for usage in usages if usage is not None]
    assert counts == [(8, 1), (8, 3), (8, 3)]


async def test_earlier_turns_keep_their_calls_and_parts() -> None:
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.chat.completions.create(model="tiny", messages=messages))
        request = await setup.answer("Hello")
        await asking
    assert bytes(request.prompt_token_ids) == b"<system>be\nkind<assistant><tool>2"


async def test_logprobs_come_in_openais_new_shape() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(
                model="tiny",
                messages=HI,
                logprobs=True,
                top_logprobs=1,
                extra_body={"return_tokens_as_token_ids": False},
            )
        )
        producer, consumer = await setup.pair.next_requests()
        assert producer.sampling_params.logprobs == 1
        top = [TokenLogprobs([97, 98], [-0.5, -0.25], 2)]
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, logprobs=top)
        setup.pair.decode.send(consumer, 1, [], finish_reason=FinishReason.LENGTH)
        [choice] = (await asking).choices
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == {
        "content": [
            {
                "token": "a",
                "bytes": [97],
                "logprob": -0.5,
                "top_logprobs": [{"token": "b", "bytes": [98], "logprob": -0.25}],
            }
        ],
        "refusal": None,
    }


async def test_calls_that_the_model_writes_are_tool_calls() -> None:
    async with http_setup(HERMES) as setup:
        asking = asyncio.create_task(setup.client.chat.completions.create(model="tiny", messages=HI, tools=[F, G]))
        request = await setup.answer(CALL)
        [choice] = (await asking).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Yes."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    assert bytes(request.prompt_token_ids) == b"[2 tools]<user>hi"
    assert request.sampling_params.structured_output is None


async def test_the_calls_of_a_stream_come_in_deltas() -> None:
    async with http_setup(HERMES) as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, tools=[F], stream=True)
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, CALL[0], end_cause=EndCause.HANDED_OVER)
        for index, char in enumerate(CALL[1:], start=1):
            setup.pair.decode.send(consumer, index, char)
        setup.pair.decode.send(consumer, len(CALL), "!", finish_reason=FinishReason.STOP, stop_token_id=33)
        choices = [chunk.choices[0] async for chunk in await asking]

    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0] * len(calls)
    assert (calls[0].type, calls[0].function and calls[0].function.name) == ("function", "f")
    assert calls[0].id is not None
    assert "".join((call.function and call.function.arguments) or "" for call in calls) == '{"a": 1}'
    assert "".join(choice.delta.content or "" for choice in choices) == "Yes."
    assert choices[-1].finish_reason == "tool_calls"
    assert len(calls) > 3, "arguments come as they are written"


async def test_a_token_whose_text_is_held_back_has_its_event_with_empty_content() -> None:
    """When a client gets events does not depend on what their text is. vLLM sends the same."""
    async with http_setup() as setup:
        stream = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, stream=True, stop="END")
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, [0xC3], end_cause=EndCause.HANDED_OVER)
        chunks = aiter(await stream)
        begin = [(await anext(chunks)).choices[0].delta.model_dump(exclude_unset=True) for _ in range(2)]
        assert begin == [{"role": "assistant", "content": ""}, {"content": ""}], "half a character"
        for position, token in enumerate([0xA9, ord("E"), ord("N")], start=1):
            setup.pair.decode.send(consumer, position, [token])
            [choice] = (await anext(chunks)).choices
            assert choice.delta.model_dump(exclude_unset=True) == {"content": "é" if position == 1 else ""}
        setup.pair.decode.send(consumer, 4, "O", finish_reason=FinishReason.LENGTH)
        rest = [choice async for chunk in chunks for choice in chunk.choices]
    assert [(choice.delta.content, choice.finish_reason) for choice in rest] == [("ENO", None), (None, "length")]


async def test_held_back_content_delays_no_log_probabilities() -> None:
    top = [TokenLogprobs([0xC3], [-0.5], 1), TokenLogprobs([0xA9], [-0.25], 1)]
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, stream=True, logprobs=True)
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, [0xC3], end_cause=EndCause.HANDED_OVER, logprobs=top[:1])
        setup.pair.decode.send(consumer, 1, [0xA9], finish_reason=FinishReason.LENGTH, logprobs=top[1:])
        choices = [choice async for chunk in await asking for choice in chunk.choices]
    logprobs = [choice.logprobs and [one.logprob for one in choice.logprobs.content or ()] for choice in choices]
    assert [choice.delta.content for choice in choices] == ["", "", "é", None]
    assert logprobs == [None, [-0.5], [-0.25], None]


async def test_tokens_that_a_parser_holds_back_have_events_with_an_empty_delta() -> None:
    """An empty content would turn the content of a message with calls from null to an empty text."""
    async with http_setup(HERMES) as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, tools=[F], stream=True)
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "<", end_cause=EndCause.HANDED_OVER)
        for position, char in enumerate("tool_", start=1):
            setup.pair.decode.send(consumer, position, char)
        setup.pair.decode.send(consumer, 6, "!", finish_reason=FinishReason.LENGTH)
        deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in await asking]
    assert deltas == [{"role": "assistant", "content": ""}, *[{}] * 6, {"content": "<tool_!"}, {}]


async def test_tools_that_must_not_be_called_are_not_shown() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(model="tiny", messages=HI, tools=[F], tool_choice="none")
        )
        request = await setup.answer(CALL)
        [choice] = (await asking).choices
    assert choice.message.content == CALL
    assert bytes(request.prompt_token_ids) == b"<user>hi"


async def test_a_named_function_is_called_by_the_form_of_the_output() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(
                model="tiny", messages=HI, tools=[F, G], tool_choice={"type": "function", "function": {"name": "f"}}
            )
        )
        request = await setup.answer('{"a": 1}')
        [choice] = (await asking).choices
    structured = request.sampling_params.structured_output
    assert structured is not None
    assert json.loads(structured.value) == F["function"]["parameters"]
    assert choice.finish_reason == "stop", "as OpenAI has it"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_is_one_of_the_tools(parallel: bool) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(
                model="tiny", messages=HI, tools=[F, G], tool_choice="required", parallel_tool_calls=parallel
            )
        )
        request = await setup.answer('[{"name": "f", "parameters": {"a": 1}}]')
        [choice] = (await asking).choices
    structured = request.sampling_params.structured_output
    assert structured is not None
    schema = json.loads(structured.value)
    assert schema["$defs"] == {"tool0_A": {"type": "integer"}}
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    first = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert first == {"type": "object", "properties": {"a": {"$ref": "#/$defs/tool0_A"}}}
    assert schema.get("maxItems") == (None if parallel else 1)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    assert [call.type == "function" and call.function.arguments for call in choice.message.tool_calls] == ['{"a": 1}']


@pytest.mark.parametrize(
    ("name", "thinks", "text", "expected"),
    [
        ("qwen3", None, "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("qwen3", None, "yes", (None, "yes")),
        ("deepseek_r1", None, "hm</think>yes", ("hm", "yes")),
        ("deepseek_r1", False, "yes", (None, "yes")),
        ("mistral", None, "[THINK]hm[/THINK]yes", ("hm", "yes")),
    ],
)
async def test_reasoning_is_told_from_the_answer(
    name: Literal["qwen3", "deepseek_r1", "mistral"], thinks: bool | None, text: str, expected: tuple[str | None, str]
) -> None:
    body = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
    async with http_setup(HttpConfig(reasoning_parser=name)) as setup:
        asking = asyncio.create_task(setup.client.chat.completions.create(model="tiny", messages=HI, extra_body=body))
        await setup.answer(text)
        [choice] = (await asking).choices
    assert ((choice.message.model_extra or {}).get("reasoning_content"), choice.message.content) == expected


class Point(BaseModel):
    x: int
    y: int


async def test_openais_parse_gets_its_model() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.parse(model="tiny", messages=HI, response_format=Point)
        )
        request = await setup.answer('{"x": 1, "y": 2}')
        completion = await asking
    assert completion.choices[0].message.parsed == Point(x=1, y=2)
    structured = request.sampling_params.structured_output
    assert structured is not None
    assert json.loads(structured.value)["required"] == ["x", "y"]


def _picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": {}}]}]}, "messages[0].content[0]"),
        ({"messages": _picture("http://169.254.169.254/")}, "messages"),
        ({"messages": _picture("data:image/png;base64,AAAA")}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"tools": [F], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"tools": [F]}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [F, F], "tool_choice": "required"}, "tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "messages"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_mistakes_are_named_as_they_were_sent(body: dict[str, Any], param: str) -> None:
    async with http_setup() as setup:
        with pytest.raises(openai.BadRequestError) as caught:
            await setup.client.chat.completions.create(model="tiny", messages=HI, extra_body=body)
    assert caught.value.param == param
    assert_nothing_is_left(setup.pair)


async def test_stream_options_need_a_stream() -> None:
    async with http_setup() as setup:
        with pytest.raises(openai.BadRequestError) as caught:
            await setup.client.chat.completions.create(
                model="tiny", messages=HI, extra_body={"stream_options": {"include_usage": True}}
            )
    assert caught.value.param == "stream_options"


def test_documents_are_shown_to_the_template() -> None:
    body = ChatCompletionRequest(messages=[], documents=[{"title": "a", "text": "b"}])
    assert chat_prompt(body).variables == {"documents": [{"title": "a", "text": "b"}]}
