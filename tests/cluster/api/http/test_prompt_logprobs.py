"""An answer's echo of its prompt: its text, its tokens, and how likely these were."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.serving_setup import assert_nothing_is_left

PROMPT = "hé!"
PROMPT_LOGPROBS = [
    TokenLogprobs([0xC3, 97, 98], [-0.5, -0.125, -0.25], 3),
    TokenLogprobs([0xA9, 0xA9, 98], [-0.75, -0.75, -1.0], 1),
    TokenLogprobs([33, 33, 98], [-1.5, -1.5, -2.0], 1),
]
"""The log-probabilities of all of the prompt's tokens but the first."""


async def _answer(setup: Setup, text: str = "a", stop_token_id: int | None = None) -> EngineCoreRequest:
    """One token, and that was it."""
    producer = await setup.pair.prefill.next_request()
    setup.pair.prefill.send(
        producer,
        0,
        text,
        finish_reason=FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP,
        stop_token_id=stop_token_id,
        logprobs=[TokenLogprobs([97, 97, 98], [-0.5, -0.5, -0.625], 1)],
        prompt_logprobs=PROMPT_LOGPROBS,
    )
    return producer


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
async def test_an_echo_has_the_prompts_logprobs_as_openai_has_them(prompt: str | list[int]) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1)
        )
        request = await _answer(setup)
        [choice] = (await asking).choices
        assert_nothing_is_left(setup.pair)

    assert request.sampling_params.prompt_logprobs == 1
    assert choice.text == "hé!a"
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == {
        "tokens": ["h", "\ufffd", "\ufffd", "!", "a"],
        "token_logprobs": [None, -0.5, -0.75, -1.5, -0.5],
        "top_logprobs": [
            None,
            {"\ufffd": -0.5, "a": -0.125},
            {"\ufffd": -0.75},
            {"!": -1.5},
            {"a": -0.5, "b": -0.625},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }


async def test_an_echo_of_no_more_than_the_prompt_has_no_token_of_the_answer() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
        )
        request = await _answer(setup, "\n", stop_token_id=10)
        completion = await asking

    [choice] = completion.choices
    assert (request.sampling_params.max_tokens, request.sampling_params.prompt_logprobs) == (1, 0)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.75, -1.5]
    assert choice.logprobs.top_logprobs == [None, {"\ufffd": -0.5}, {"\ufffd": -0.75}, {"!": -1.5}]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 0)


async def test_a_stream_begins_with_the_echo() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(
                model="tiny", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, stream=True
            )
        )
        await _answer(setup)
        [chunk] = [chunk async for chunk in await asking]
    [choice] = chunk.choices
    assert choice.text == "hé!a"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.75, -1.5, -0.5]


async def test_every_sample_has_the_echo_of_its_prompt() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt=[PROMPT] * 2, n=2, echo=True, logprobs=0, max_tokens=1)
        )
        asked = [await _answer(setup) for _ in range(4)]
        choices = (await asking).choices

    assert sum(request.sampling_params.prompt_logprobs == 0 for request in asked) == 2, "once for each prompt"
    assert [choice.text for choice in choices] == ["hé!a"] * 4
    for choice in choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.75, -1.5, -0.5]
        assert choice.logprobs.text_offset == [0, 1, 1, 2, 3]


VLLMS = [
    None,
    {
        "195": {"logprob": -0.5, "rank": 3, "decoded_token": "\ufffd"},
        "97": {"logprob": -0.125, "rank": 1, "decoded_token": "a"},
    },
    {"169": {"logprob": -0.75, "rank": 1, "decoded_token": "\ufffd"}},
    {"33": {"logprob": -1.5, "rank": 1, "decoded_token": "!"}},
]
EXTRA: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_completions_have_prompt_logprobs_as_vllm_has_them(is_stream: bool) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=1, extra_body=EXTRA, stream=is_stream
            )
        )
        await _answer(setup)
        answer: Any = await asking
        if is_stream:
            [answer] = [chunk async for chunk in answer]
    [choice] = answer.choices
    assert choice.text == "a"
    assert choice.logprobs is None
    assert choice.prompt_logprobs == VLLMS
    assert (choice.prompt_token_ids, choice.token_ids) == (list(PROMPT.encode()), [97])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chats_have_prompt_logprobs_as_vllm_has_them(is_stream: bool) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=1,
                extra_body=EXTRA,
                stream=is_stream,
            )
        )
        await _answer(setup)
        answer: Any = await asking
        if is_stream:
            [answer, *others] = [chunk async for chunk in answer]
            assert not any("prompt_logprobs" in (chunk.model_extra or {}) for chunk in others)
    assert answer.prompt_logprobs == VLLMS
    assert answer.prompt_token_ids == list(b"<user>hi")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_mistakes_are_named_as_they_were_sent(body: dict[str, Any], param: str) -> None:
    async with http_setup() as setup:
        with pytest.raises(openai.BadRequestError) as caught:
            await setup.client.completions.create(model="tiny", prompt="hello", extra_body=body)
    assert caught.value.param == param
