"""/v1/completions as OpenAI's client sees it.

Tests of cluster/api/http/openai/answers.py, cluster/api/http/openai/logprob_shapes.py,
cluster/api/http/openai/logprob_texts.py, cluster/api/http/responses.py, cluster/api/http/sampling.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from actors.core.requests.slo import Slo
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.serving_setup import assert_nothing_is_left


async def test_an_answer_has_text_reasons_and_usage() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", max_tokens=9))
        request = await setup.answer("Hi")
        completion = await asking

    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("Hi", "stop", 0)
    assert completion.id.startswith("cmpl-")
    assert completion._request_id == completion.id
    assert completion.model == "tiny"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        5,
        3,
        8,
    )
    assert request.sampling_params.max_tokens == 9
    assert_nothing_is_left(setup.pair)


async def test_without_max_tokens_there_are_16_as_openai_has_it() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt=[104, 105]))
        request = await setup.answer("Hi")
        await asking
    assert (request.prompt_token_ids, request.sampling_params.max_tokens) == ([104, 105], 16)


async def test_a_stream_brings_text_as_it_comes_and_usage_at_its_end() -> None:
    async with http_setup() as setup:
        stream = asyncio.create_task(
            setup.client.completions.create(
                model="tiny", prompt="hello", stream=True, stream_options={"include_usage": True}
            )
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        chunks = aiter(await stream)
        first = await anext(chunks)
        assert [choice.text for choice in first.choices] == ["a"]
        assert first.usage is None
        setup.pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
        *middle, last = [chunk async for chunk in chunks]

    assert [(choice.text, choice.finish_reason) for chunk in middle for choice in chunk.choices] == [("b", "length")]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 2)


async def test_every_chunk_can_have_the_usage_so_far() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", stream=True, stream_options=options)
        )
        await setup.answer("abc", FinishReason.LENGTH)
        counts = [
            chunk.usage and (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) async for chunk in await asking
        ]
    assert counts == [(5, 1), (5, 3), (5, 3)]


async def test_a_token_whose_text_is_held_back_has_its_event_with_empty_text() -> None:
    """When a client gets events does not depend on what their text is. vLLM sends the same."""
    async with http_setup() as setup:
        stream = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", stream=True, stop="END")
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, [0xC3], end_cause=EndCause.HANDED_OVER)
        chunks = aiter(await stream)
        assert [choice.text for choice in (await anext(chunks)).choices] == [""], "half a character"
        for position, token in enumerate([0xA9, ord("E"), ord("N")], start=1):
            setup.pair.decode.send(consumer, position, [token])
            [choice] = (await anext(chunks)).choices
            assert choice.text == ("é" if position == 1 else "")
        setup.pair.decode.send(consumer, 4, "O", finish_reason=FinishReason.LENGTH)
        rest = [choice async for chunk in chunks for choice in chunk.choices]
    assert [(choice.text, choice.finish_reason) for choice in rest] == [("ENO", "length")]


async def test_held_back_text_delays_neither_log_probabilities_nor_usage() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    top = [TokenLogprobs([0xC3], [-0.5], 1), TokenLogprobs([0xA9], [-0.25], 1)]
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(
                model="tiny", prompt="hello", stream=True, stream_options=options, logprobs=0
            )
        )
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, [0xC3], end_cause=EndCause.HANDED_OVER, logprobs=top[:1])
        setup.pair.decode.send(consumer, 1, [0xA9], finish_reason=FinishReason.LENGTH, logprobs=top[1:])
        *chunks, _ = [chunk async for chunk in await asking]
    shown = [
        (choice.text, choice.logprobs and choice.logprobs.token_logprobs, chunk.usage and chunk.usage.completion_tokens)
        for chunk in chunks
        for choice in chunk.choices
    ]
    assert shown == [("", [-0.5], 1), ("é", [-0.25], 2)]


async def test_logprobs_come_in_openais_old_shape() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", logprobs=1, max_tokens=2)
        )
        producer, consumer = await setup.pair.next_requests()
        top = [TokenLogprobs([97, 98], [-0.5, -0.25], 2), TokenLogprobs([195, 195], [float("-inf"), -1.0], 9)]
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, logprobs=top[:1])
        setup.pair.decode.send(consumer, 1, [195], finish_reason=FinishReason.LENGTH, logprobs=top[1:])
        [choice] = (await asking).choices

    assert choice.text == "a", "half a character is none"
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == {
        "tokens": ["a", "�"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"a": -0.5, "b": -0.25}, {"�": -1.0}],
        "text_offset": [0, 1],
    }


async def test_each_prompt_has_n_answers_in_order() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt=["one", "three"], n=2, max_tokens=2, seed=5)
        )
        await _answer_all(setup, 4)
        completion = await asking

    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in completion.choices] == ["3.", "3.", "5.", "5."]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (8, 8)
    assert_nothing_is_left(setup.pair)


async def _answer_all(setup: Setup, num_answers: int) -> None:
    """Each says how long its prompt is."""

    async def answer_on_prefill() -> None:
        while True:
            request = await setup.pair.prefill.next_request()
            setup.pair.prefill.send(request, 0, str(len(request.prompt_token_ids)), end_cause=EndCause.HANDED_OVER)

    prefilling = asyncio.create_task(answer_on_prefill())
    for _ in range(num_answers):
        request = await setup.pair.decode.next_request()
        is_alone = request.kv_transfer_params is None
        text = f"{len(request.prompt_token_ids)}." if is_alone else "."
        setup.pair.decode.send(request, 0 if is_alone else 1, text, finish_reason=FinishReason.LENGTH)
    prefilling.cancel()
    await asyncio.gather(prefilling, return_exceptions=True)


async def test_vllms_further_parameters_reach_the_engines() -> None:
    extra: dict[str, Any] = {
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "priority": -3,
        "cache_salt": "s",
        "slo": {"ttft_ms": 250},
        "request_id": "mine",
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "bad_words": ["ab"],
        "allowed_token_ids": [72, 105, 10],
        "truncate_prompt_tokens": 4,
        "add_special_tokens": False,
        "suffix": None,
    }
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(
                model="tiny",
                prompt="hello",
                extra_body=extra,
                stop=["END"],
                seed=3,
                temperature=0.5,
                top_p=0.75,
                presence_penalty=1.0,
                frequency_penalty=-1.0,
                logit_bias={"5": 2},
                user="somebody",
            )
        )
        request = await setup.answer("Hi")
        completion = await asking

    params = request.sampling_params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (7, 0.25, 1.5, 2)
    assert (params.ignore_eos, params.stop_token_ids, params.seed, params.temperature) == (True, (9,), 3, 0.5)
    assert (params.top_p, params.presence_penalty, params.frequency_penalty) == (0.75, 1.0, -1.0)
    assert params.logit_bias == {5: 2.0}
    assert (params.allowed_token_ids, params.bad_words) == ((72, 105, 10), ((97, 98),))
    assert (request.priority, request.cache_salt, request.slo) == (-3, "s", Slo(ttft_s=0.25))
    assert completion.id == "cmpl-mine"
    assert completion.choices[0].model_extra == {
        "stop_reason": 10,
        "token_ids": list(b"Hi\n"),
        "prompt_token_ids": list(b"ello"),
    }


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "é"]}, "choice", '["a", "é"]'),
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"guided_json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json_object": True}, "json_object", ""),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
    ],
)
async def test_the_outputs_form_can_be_given_in_every_way(body: dict[str, Any], kind: str, value: str) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", extra_body=body))
        request = await setup.answer("Hi")
        await asking
    structured = request.sampling_params.structured_output
    assert structured is not None
    assert (structured.kind, structured.value) == (kind, value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2, 10**9]}, "prompt"),
        ({"prompt": "x" * 100}, "prompt"),
        ({"prompt": []}, "prompts"),
        ({"temperature": float(-1)}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"logit_bias": {str(index): 1.0 for index in range(2000)}}, "logit_bias"),
        ({"seed": 2**80}, "seed"),
        ({"top_k": "7"}, "top_k"),
        ({"guided_jsn": "{}"}, "guided_jsn"),
        ({"guided_regex": "x" * 1_000_000}, "guided_regex"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2, "echo": True}, "truncate_prompt_tokens"),
        ({"bad_words": ["x"] * 1000}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 20_000}, "allowed_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias.x"),
        ({"Foo": 1}, "Foo"),
    ],
)
async def test_mistakes_are_named_as_they_were_sent(body: dict[str, Any], param: str) -> None:
    async with http_setup() as setup:
        with pytest.raises(openai.BadRequestError) as caught:
            await setup.client.completions.create(model="tiny", prompt="hello", extra_body=body)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message
    assert_nothing_is_left(setup.pair)
