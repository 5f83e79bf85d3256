"""How much of a prompt is taken, and whether the tokenizer adds to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.errors import InvalidRequest
from cluster.parameters.generation import (
    ChatMessage,
    ChatPrompt,
    EmbedsPrompt,
    GenerateRequest,
    ImageInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import SamplingOptions
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, bos_tokenizer

BOS = EOS_TOKEN_ID
TEXT = TextPrompt("hello")
TOKENS = TokenPrompt(list(b"hello"))
CHAT = ChatPrompt([ChatMessage("user", "hello")])
PLAIN = SamplingOptions()
MODEL = ModelDescription("tiny", max_model_len=32, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def _template(messages: list[dict[str, JSON]], variables: dict[str, JSON]) -> str:
    del variables
    return "".join(f"<{message['content']}>" for message in messages)


PROCESSOR = InputProcessor(MODEL, ModelTokenizer(bos_tokenizer(), _template, use_fastokens=True))


async def taken(
    prompt: Prompt,
    truncate: int | None = None,
    *,
    adds: bool | None = None,
    sampling: SamplingOptions = PLAIN,
) -> list[int]:
    request = GenerateRequest(
        prompt=prompt, truncate_prompt_tokens=truncate, add_special_tokens=adds, sampling=sampling
    )
    return (await PROCESSOR.process(request)).prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "adds", "expected"),
    [
        (TEXT, None, [BOS, *b"hello"]),
        (TEXT, True, [BOS, *b"hello"]),
        (TEXT, False, [*b"hello"]),
        (CHAT, None, [*b"<hello>"]),
        (CHAT, True, [BOS, *b"<hello>"]),
        (CHAT, False, [*b"<hello>"]),
        (TOKENS, True, [*b"hello"]),
    ],
)
async def test_special_tokens_are_added_to_texts_unless_told_otherwise(
    prompt: Prompt, adds: bool | None, expected: list[int]
) -> None:
    assert await taken(prompt, adds=adds) == expected
    assert await PROCESSOR.tokenize(prompt, adds) == expected


@pytest.mark.parametrize(
    ("prompt", "truncate", "expected"),
    [
        (TEXT, 2, b"lo"),
        (TEXT, 5, b"hello"),
        (TEXT, 6, [BOS, *b"hello"]),
        (TEXT, 100, [BOS, *b"hello"]),
        (TEXT, -1, [BOS, *b"hello"]),
        (CHAT, 3, b"lo>"),
        (TOKENS, 1, b"o"),
    ],
)
async def test_only_the_last_tokens_are_taken(prompt: Prompt, truncate: int, expected: Sequence[int]) -> None:
    assert await taken(prompt, truncate) == list(expected)


@pytest.mark.parametrize(
    ("sampling", "num_taken"),
    [
        (SamplingOptions(), 31),
        (SamplingOptions(max_tokens=10), 22),
        (SamplingOptions(min_tokens=5), 27),
        (SamplingOptions(max_tokens=31), 1),
    ],
)
async def test_minus_one_takes_what_the_output_leaves_of_the_context(sampling: SamplingOptions, num_taken: int) -> None:
    long = [token_id % 250 for token_id in range(300)]

    assert await taken(TokenPrompt(long), -1, sampling=sampling) == long[-num_taken:]
    assert len(await taken(TextPrompt("x" * 300), -1, sampling=sampling)) == num_taken


@pytest.mark.parametrize(
    ("prompt", "truncate", "sampling", "field"),
    [
        (TEXT, 0, SamplingOptions(), "truncate_prompt_tokens"),
        (TEXT, -2, SamplingOptions(), "truncate_prompt_tokens"),
        (TEXT, 2**40, SamplingOptions(), "truncate_prompt_tokens"),
        (TokenPrompt([1] * 40), 32, SamplingOptions(), "token_ids"),
        (TokenPrompt([1] * 40), 20, SamplingOptions(max_tokens=20), "sampling_params.max_tokens"),
        (TokenPrompt([1] * 40), -1, SamplingOptions(max_tokens=32), "sampling_params.max_tokens"),
        (TokenPrompt([VOCAB_SIZE, *[1] * 40]), 3, SamplingOptions(), "token_ids"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    prompt: Prompt, truncate: int, sampling: SamplingOptions, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await taken(prompt, truncate, sampling=sampling)

    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(
    "prompt",
    [
        EmbedsPrompt(bytes(8), 1, 2, "float32"),
        ChatPrompt([ChatMessage("user", "", parts=("look: ", ImageInput(b"png")))]),
    ],
)
async def test_what_is_not_text_is_not_cut(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 5; allowed: none"):
        await taken(prompt, 5)


async def test_a_text_that_is_too_long_is_still_refused_where_nobody_asked_for_less() -> None:
    with pytest.raises(InvalidRequest, match="fewer than the context's 32 tokens"):
        await taken(TextPrompt("x" * 300))
