"""Mistakes in a request for vectors are reported before any engine hears of it.

Tests of cluster/vectors/vector_requests.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.adapter import Adapter
from actors.core.requests.sampling_params import PoolingParams
from cluster.access.caller import Caller
from cluster.errors import InvalidRequest, ModelNotFound, PermissionDenied
from cluster.parameters.generation import ChatMessage, ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import InputProcessor
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.vectors.vector_processing import AnyVectorRequest, process_vectors
from cluster.vectors.vector_requests import ClassifyRequest, EmbedRequest, ScoreRequest
from tests.cluster.serving_setup import MODEL
from tests.cluster.vectors.vector_setup import CLASSIFIES, EMBEDS, SCORES
from tests.fakes import VOCAB_SIZE, byte_tokenizer

A = TextPrompt("a")
LIMITS = InputLimits(max_inputs=4, max_prompt_chars=100)


def processor_of(facts: PoolingFacts | None = EMBEDS, *, generates: bool = True) -> InputProcessor:
    model = replace(MODEL, pooling=facts, generates=generates)
    return InputProcessor(model, ModelTokenizer(byte_tokenizer(), use_fastokens=True), LIMITS)


async def violations_of(request: AnyVectorRequest, facts: PoolingFacts | None = EMBEDS) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as raised:
        await process_vectors(processor_of(facts), request)
    return {violation.field: violation.allowed for violation in raised.value.violations}


async def test_what_is_not_said_is_as_the_checkpoint_was_made_for() -> None:
    facts = PoolingFacts(embedding_size=8, pooling="cls", normalize=False)
    [prompt] = await process_vectors(
        processor_of(facts), EmbedRequest(request_id="r", inputs=[A], timeout_s=5.0, priority=3), lambda: 100.0
    )
    assert prompt.pooling_params == PoolingParams(pooling="cls", normalize=False)
    assert (prompt.prompt_token_ids, prompt.deadline_s, prompt.priority) == ([97], 105.0, 3)
    assert prompt.request_id.startswith("r-")


async def test_every_wrong_input_is_named() -> None:
    inputs: list[Prompt | None] = [A, TextPrompt(""), None, TokenPrompt([5, VOCAB_SIZE])]
    assert await violations_of(EmbedRequest(inputs=inputs)) == {
        "inputs[1].text": "at least one character",
        "inputs[2].prompt": "one of text, token_ids and chat",
        "inputs[3].token_ids": f"token ids from 0 to {VOCAB_SIZE - 1}",
    }
    chat = ChatPrompt([ChatMessage("user", "hi")])
    assert await violations_of(EmbedRequest(inputs=[TokenPrompt([]), TextPrompt("b" * 65), chat])) == {
        "inputs[0].token_ids": "1 to 64 tokens",
        "inputs[1].text": "1 to 64 tokens",
        "inputs[2].chat": "this model has no chat template",
    }


async def test_an_input_may_fill_the_context() -> None:
    [prompt] = await process_vectors(processor_of(), EmbedRequest(inputs=[TextPrompt("b" * 64)]))
    assert len(prompt.prompt_token_ids) == 64


def truncated(limit: int, *inputs: Prompt) -> EmbedRequest:
    return EmbedRequest(inputs=inputs, truncate_prompt_tokens=limit)


async def test_of_an_input_that_is_too_long_only_the_beginning_is_read() -> None:
    too_long: list[Prompt] = [TextPrompt("ab" * 40), TokenPrompt([97, 98] * 40), TextPrompt("c")]
    for limit, length in ((-1, 64), (64, 64), (3, 3), (1, 1)):
        first, second, third = await process_vectors(processor_of(), truncated(limit, *too_long))
        assert first.prompt_token_ids == second.prompt_token_ids == ([97, 98] * 40)[:length]
        assert third.prompt_token_ids == [99]


@pytest.mark.parametrize("kind", ["texts", "tokens"])
async def test_of_a_pair_that_is_too_long_the_longer_one_is_cut(kind: str) -> None:
    query, document = TextPrompt("abc"), TextPrompt("d" * 9)
    pair: list[TextPrompt] | list[TokenPrompt] = [query, document]
    if kind == "tokens":
        pair = [TokenPrompt(list(prompt.text.encode())) for prompt in (query, document)]
    request = ScoreRequest(query=pair[0], documents=[pair[1]], truncate_prompt_tokens=8)
    [read] = await process_vectors(processor_of(SCORES), request)
    assert bytes(read.prompt_token_ids) == b"abcddddd"
    [read] = await process_vectors(processor_of(SCORES), replace(request, truncate_prompt_tokens=5))
    assert bytes(read.prompt_token_ids) == b"abddd"


async def test_a_query_and_its_documents_are_cut_each_for_itself_where_they_are_read_so() -> None:
    request = ScoreRequest(query=TextPrompt("ab"), documents=[TextPrompt("cde")], truncate_prompt_tokens=2)
    assert [bytes(one.prompt_token_ids) for one in await process_vectors(processor_of(), request)] == [b"ab", b"cd"]


async def test_an_input_that_is_cut_may_not_be_empty_either() -> None:
    assert await violations_of(truncated(5, TextPrompt(""), TokenPrompt([]))) == {
        "inputs[0].text": "at least one character",
        "inputs[1].token_ids": "1 to 64 tokens",
    }


@pytest.mark.parametrize(
    ("request_", "facts", "field", "allowed"),
    [
        *(
            (truncated(limit, A), EMBEDS, "truncate_prompt_tokens", "1 to 64, or -1 for as many as fit")
            for limit in (0, -2, 65)
        ),
        (EmbedRequest(inputs=[]), EMBEDS, "inputs", "1 to 4"),
        (EmbedRequest(inputs=[A] * 5), EMBEDS, "inputs", "1 to 4"),
        (EmbedRequest(inputs=[TextPrompt("b" * 51)] * 2), EMBEDS, "inputs", "at most 100 characters in all"),
        (EmbedRequest(inputs=[A], pooling="max"), EMBEDS, "pooling", "one of last, mean, cls"),
        (EmbedRequest(inputs=[A], dimensions=3), EMBEDS, "dimensions", "1 to 2"),
        (EmbedRequest(inputs=[A], dimensions=0), EMBEDS, "dimensions", "1 to 2"),
        (
            EmbedRequest(inputs=[A], dimensions=3),
            PoolingFacts(embedding_size=8, matryoshka_dimensions=(2, 4)),
            "dimensions",
            "one of 2, 4, 8",
        ),
        (
            EmbedRequest(inputs=[A] * 4),
            PoolingFacts(embedding_size=1_000_000),
            "inputs",
            "at most 3000000: send fewer at a time",
        ),
        (EmbedRequest(inputs=[A], request_id="é"), EMBEDS, "request_id", "at most 128 printable ASCII characters"),
        (EmbedRequest(inputs=[A]), None, "model", "one that embeds (raypd cannot read its hidden states)"),
        (
            EmbedRequest(inputs=[A]),
            PoolingFacts(why_no_embeddings="its pooling is odd"),
            "model",
            "one that embeds (its pooling is odd)",
        ),
        (ClassifyRequest(inputs=[A]), EMBEDS, "model", "one with a classification head"),
        (ScoreRequest(query=A, documents=[]), EMBEDS, "documents", "1 to 4"),
        (ScoreRequest(query=A, documents=[A]), None, "model", "one that embeds, or has a head of one class"),
        (ScoreRequest(query=A, documents=[A]), CLASSIFIES, "model", "one whose classification head has one class"),
    ],
)
async def test_a_request_that_this_model_cannot_answer_is_refused(
    request_: AnyVectorRequest, facts: PoolingFacts | None, field: str, allowed: str
) -> None:
    assert await violations_of(request_, facts) == {field: allowed}


async def test_a_pair_is_read_together_and_has_to_be_of_one_kind() -> None:
    texts = ScoreRequest(query=TextPrompt("ab"), documents=[TextPrompt("c")])
    tokens = ScoreRequest(query=TokenPrompt([1]), documents=[TokenPrompt([2, 3])])
    for request, expected in ((texts, [97, 98, 99]), (tokens, [1, 2, 3])):
        [prompt] = await process_vectors(processor_of(SCORES), request)
        assert prompt.prompt_token_ids == expected
        assert prompt.pooling_params == PoolingParams(task="score")
    mixed = ScoreRequest(query=TextPrompt("ab"), documents=[TokenPrompt([2]), None, TextPrompt("")])
    assert list(await violations_of(mixed, SCORES)) == [f"documents[{index}].text" for index in range(3)]
    assert await violations_of(replace(texts, query=None), SCORES) == {
        "documents[0].prompt": "one of text, token_ids and chat"
    }


async def test_who_may_ask_what_is_the_same_as_for_text() -> None:
    with pytest.raises(ModelNotFound):
        await process_vectors(processor_of(), EmbedRequest(inputs=[A], model="other"))
    caller = Caller("token", highest_priority=1)
    with pytest.raises(PermissionDenied):
        await process_vectors(processor_of(), EmbedRequest(inputs=[A], priority=-1, caller=caller))


async def test_the_name_of_an_adapter_is_a_model() -> None:
    processor = processor_of()
    adapter = Adapter("mine", "/adapters/mine", "digest")
    processor.adapters.register([adapter])
    [prompt] = await process_vectors(processor, EmbedRequest(inputs=[A], model="mine"))
    assert prompt.lora == adapter
    caller = Caller("token", adapters=frozenset({"other"}))
    with pytest.raises(ModelNotFound, match="model 'mine' is not served here"):
        await process_vectors(processor, EmbedRequest(inputs=[A], model="mine", caller=caller))


async def test_text_is_not_asked_of_a_model_that_gives_vectors() -> None:
    with pytest.raises(InvalidRequest, match="one that generates; this one gives vectors"):
        await processor_of(generates=False).process(GenerateRequest(prompt=A))
