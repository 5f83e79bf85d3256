"""Input that is meant to hurt is refused by bounds (InputLimits; docs/security.md has them), and hurts nobody else."""
# ruff: noqa: E501  # a table

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from cluster.api.protos.raypd.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2
from tests.attacks.wire import empties, inside
from tests.cluster.api.grpc.answering import answering_ingress, methods, status_of

METHODS = {method.name: method for method in methods()}
MIB = 2**20
NAN, INFINITY = float("nan"), float("inf")
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
DEEP_JSON = '{"type": "array", "items": ' * 50_000
DEEP_SCHEMA: dict[str, Any] = {"type": "integer"}
for _ in range(40):
    DEEP_SCHEMA = {"type": "array", "items": DEEP_SCHEMA}


def generate(**fields: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**({"text": "x"} | fields))


def sampling(**fields: Any) -> generate_pb2.GenerateRequest:
    return generate(sampling_params=generate_pb2.SamplingParams(**fields))


def chat(num_messages: int, content: str = "x") -> generate_pb2.ChatMessages:
    return generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="user", content=content)] * num_messages)


def batch(num_prompts: int = 1, **fields: Any) -> generate_pb2.GenerateBatchRequest:
    return generate_pb2.GenerateBatchRequest(prompts=[generate_pb2.Prompt(text="x")] * num_prompts, **fields)


def turns(count: int) -> bytes:
    return empties(generate_pb2.ChatMessages, "messages", count)


def parts(count: int) -> bytes:
    return inside(generate_pb2.ChatMessages, "messages", empties(generate_pb2.ChatMessage, "parts", count))


def prompts(message: type[Message], field: str, count: int) -> bytes:
    """Two prompts of so many empty turns."""
    return inside(message, field, inside(generate_pb2.Prompt, "chat", turns(count))) * 2


@functools.cache
def on_the_wire(make: Callable[[], Message | bytes]) -> bytes:
    made = make()
    return made if isinstance(made, bytes) else made.SerializeToString()


Make = Callable[[], Message | bytes]
"""Called when it is asked for."""

ATTACKS: list[tuple[str, str, Make, grpc.StatusCode, str]] = [
    ("a prompt of 10 MB", "Generate", lambda: generate(text="x" * 10 * MIB), INVALID, "text is 10485760 characters long"),
    ("a message of 20 MB", "Generate", lambda: generate(text="x" * 20 * MIB), EXHAUSTED, "larger than max"),
    ("3 million token ids", "Generate", lambda: generate(token_ids=generate_pb2.TokenIds(ids=[1] * 3_000_000)), INVALID, "token_ids"),
    ("20 000 turns of a chat", "Generate", lambda: generate(chat=chat(20_000)), INVALID, "chat"),
    ("a chat of 10 MB", "Generate", lambda: generate(chat=chat(10, "x" * MIB)), INVALID, "chat"),
    ("10 000 stop strings", "Generate", lambda: sampling(stop=["x"] * 10_000), INVALID, "at most 16 strings"),
    ("a stop string of 1 MB", "Generate", lambda: sampling(stop=["x" * MIB]), INVALID, "1 to 256 characters"),
    ("100 000 stop tokens", "Generate", lambda: sampling(stop_token_ids=[1] * 100_000), INVALID, "at most 64 tokens"),
    ("a regex of 1 MB", "Generate", lambda: sampling(regex="(a|b)*" * (MIB // 6)), INVALID, "at most 65536 characters"),
    ("a grammar of 1 MB", "Generate", lambda: sampling(grammar='root ::= "a"\n' * 80_000), INVALID, "at most 65536 characters"),
    ("10 000 choices", "Generate", lambda: sampling(choice=generate_pb2.Choices(choices=["x"] * 10_000)), INVALID, "at most 1024 texts"),
    ("JSON that is 50 000 deep", "Generate", lambda: sampling(json_schema=DEEP_JSON[:65_000]), INVALID, "JSON"),
    ("schemas 40 deep", "Generate", lambda: sampling(json_schema=json.dumps(DEEP_SCHEMA)), INVALID, "too many schemas inside each other"),
    ("a temperature of NaN", "Generate", lambda: sampling(temperature=NAN), INVALID, "temperature is nan"),
    ("a temperature of infinity", "Generate", lambda: sampling(temperature=INFINITY), INVALID, "temperature is inf"),
    ("penalties of NaN", "Generate", lambda: sampling(presence_penalty=NAN, frequency_penalty=NAN, repetition_penalty=NAN), INVALID, "repetition_penalty is nan"),
    ("top_p of NaN", "Generate", lambda: sampling(top_p=NAN, min_p=NAN), INVALID, "top_p is nan"),
    ("a huge logit_bias", "Generate", lambda: sampling(logit_bias=dict.fromkeys(range(100_000), 1.0)), INVALID, "at most 1024 tokens"),
    ("many allowed tokens", "Generate", lambda: sampling(allowed_token_ids=[1] * 100_000), INVALID, "1 to 16384 tokens"),
    ("many bad words", "Generate", lambda: sampling(bad_words=["x"] * 100_000), INVALID, "at most 256 words"),
    ("a long bad word", "Generate", lambda: sampling(bad_words=["x" * MIB]), INVALID, "words of 1 to 256 characters"),
    ("a logit_bias of NaN", "Generate", lambda: sampling(logit_bias={1: NAN}), INVALID, "values from -100 to 100"),
    ("a logit_bias of infinity", "Generate", lambda: sampling(logit_bias={1: INFINITY}), INVALID, "values from -100 to 100"),
    ("2 billion tokens", "Generate", lambda: sampling(max_tokens=2**31 - 1), INVALID, "max_tokens is 2147483647"),
    ("2 billion log-probabilities", "Generate", lambda: sampling(logprobs=2**31 - 1), INVALID, "logprobs is 2147483647"),
    ("2 billion log-probabilities of the prompt", "Generate", lambda: sampling(prompt_logprobs=2**31 - 1), INVALID, "prompt_logprobs is 2147483647"),
    ("a request id of 1 MB", "Generate", lambda: generate(request_id="x" * MIB), INVALID, "at most 128 printable ASCII"),
    ("a request id that breaks a log", "Generate", lambda: generate(request_id="a\nb\x1b[2J"), INVALID, "at most 128 printable ASCII"),
    ("a cache_salt of 1 MB", "Generate", lambda: generate(cache_salt="x" * MIB), INVALID, "at most 256 bytes"),
    ("a million tokens to resume", "Generate", lambda: generate(output_token_ids=[1] * 1_000_000), INVALID, "output_token_ids"),
    ("text that is no UTF-8", "Generate", lambda: b"\x1a\x02\xff\xfe", INVALID, "UTF-8"),
    ("half a message", "Generate", lambda: b"\x1a\x7f", INVALID, "a message of the method's type"),
    ("a billion samples", "GenerateBatch", lambda: batch(n=10**9), INVALID, "n is 1000000000"),
    ("a billion samples to choose from", "GenerateBatch", lambda: batch(n=1, best_of=10**9), INVALID, "best_of is 1000000000"),
    ("20 000 prompts", "GenerateBatch", lambda: batch(20_000), INVALID, "samples"),
    ("10 MB to tokenize", "Tokenize", lambda: model_pb2.TokenizeRequest(text="x" * 10 * MIB), INVALID, "10485760 characters"),
    ("5 million tokens to detokenize", "Detokenize", lambda: model_pb2.DetokenizeRequest(token_ids=[1] * 5_000_000), INVALID, "at most 4200000 numbers in all"),
    ("a billion engines", "Scale", lambda: admin_pb2.ScaleRequest(prefill=10**9), INVALID, "at most 1024"),
    ("a profile of a year", "Profile", lambda: admin_pb2.ProfileRequest(engine_id="d0", duration_seconds=3e7), INVALID, "at most 60"),
    ("a profile of NaN seconds", "Profile", lambda: admin_pb2.ProfileRequest(engine_id="d0", duration_seconds=NAN), INVALID, "at most 60"),
    ("20 000 inputs to embed", "Embed", lambda: embed_pb2.EmbedRequest(inputs=[generate_pb2.Prompt(text="x")] * 20_000), INVALID, "inputs"),
    ("2 million empty inputs", "Embed", lambda: empties(embed_pb2.EmbedRequest, "inputs", 2_000_000), INVALID, "at most 400000 entries in all"),
    ("2 million empty inputs to classify", "Classify", lambda: empties(embed_pb2.ClassifyRequest, "inputs", 2_000_000), INVALID, "at most 400000 entries in all"),
    ("2 million empty documents", "Score", lambda: empties(embed_pb2.ScoreRequest, "documents", 2_000_000), INVALID, "at most 400000 entries in all"),
    ("inputs with a million empty turns", "Embed", lambda: prompts(embed_pb2.EmbedRequest, "inputs", 500_000), INVALID, "at most 400000 entries in all"),
    ("2 million empty prompts", "GenerateBatch", lambda: empties(generate_pb2.GenerateBatchRequest, "prompts", 2_000_000), INVALID, "at most 400000 entries in all"),
    ("prompts with a million empty turns", "GenerateBatch", lambda: prompts(generate_pb2.GenerateBatchRequest, "prompts", 500_000), INVALID, "at most 400000 entries in all"),
    ("2 million empty turns", "Generate", lambda: inside(generate_pb2.GenerateRequest, "chat", turns(2_000_000)), INVALID, "at most 400000 entries in all"),
    ("2 million empty turns to tokenize", "Tokenize", lambda: inside(model_pb2.TokenizeRequest, "chat", turns(2_000_000)), INVALID, "at most 400000 entries in all"),
    ("2 million empty parts of a turn", "Generate", lambda: inside(generate_pb2.GenerateRequest, "chat", parts(2_000_000)), INVALID, "at most 400000 entries in all"),
    ("2 million empty images", "Generate", lambda: generate().SerializeToString() + empties(generate_pb2.GenerateRequest, "images", 2_000_000), INVALID, "at most 400000 entries in all"),
    ("2 million empty choices", "Generate", lambda: inside(generate_pb2.GenerateRequest, "sampling_params", inside(generate_pb2.SamplingParams, "choice", empties(generate_pb2.Choices, "choices", 2_000_000))), INVALID, "at most 400000 entries in all"),
    ("300 000 empty inputs", "Embed", lambda: empties(embed_pb2.EmbedRequest, "inputs", 300_000), INVALID, "300000 of them"),
    ("300 000 empty inputs to classify", "Classify", lambda: empties(embed_pb2.ClassifyRequest, "inputs", 300_000), INVALID, "at most 2048 of them"),
    ("300 000 empty documents", "Score", lambda: empties(embed_pb2.ScoreRequest, "documents", 300_000), INVALID, "documents is 300000"),
    ("inputs with 200 000 empty turns", "Embed", lambda: prompts(embed_pb2.EmbedRequest, "inputs", 100_000), INVALID, "at most 50000 messages"),
    ("300 000 empty prompts", "GenerateBatch", lambda: empties(generate_pb2.GenerateBatchRequest, "prompts", 300_000), INVALID, "at most 256 samples"),
    ("prompts with 200 000 empty turns", "GenerateBatch", lambda: prompts(generate_pb2.GenerateBatchRequest, "prompts", 100_000), INVALID, "at most 50000 messages"),
    ("300 000 empty turns", "Generate", lambda: inside(generate_pb2.GenerateRequest, "chat", turns(300_000)), INVALID, "at most 10000 messages"),
    ("300 000 empty turns to tokenize", "Tokenize", lambda: inside(model_pb2.TokenizeRequest, "chat", turns(300_000)), INVALID, "at most 10000 messages"),
    ("300 000 empty parts of a turn", "Generate", lambda: inside(generate_pb2.GenerateRequest, "chat", parts(300_000)), INVALID, "at most 10000 parts"),
    ("300 000 empty images", "Generate", lambda: generate().SerializeToString() + empties(generate_pb2.GenerateRequest, "images", 300_000), INVALID, "at most 1024 images"),
    ("300 000 empty choices", "Generate", lambda: inside(generate_pb2.GenerateRequest, "sampling_params", inside(generate_pb2.SamplingParams, "choice", empties(generate_pb2.Choices, "choices", 300_000))), INVALID, "at most 1024 texts"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "make", "code", "words"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
async def test_it_is_refused_with_the_bound_and_nobody_notices(
    method: str, make: Make, code: grpc.StatusCode, words: str
) -> None:
    async with answering_ingress() as (channel, serving, engine):
        refused = await status_of(channel, METHODS[method], on_the_wire(make))

        assert refused is not None
        assert refused.code() is code, refused.details()
        assert words in (refused.details() or "")
        assert len(refused.details() or "") < 4000, "an answer must not be as large as the question"
        assert engine.submitted == []
        assert serving.num_requests_in_flight == 0
        assert await status_of(channel, METHODS["Generate"], generate()) is None


@pytest.mark.parametrize(
    ("method", "make"), [a[1:3] for a in ATTACKS if "empty" in a[0]], ids=[a[0] for a in ATTACKS if "empty" in a[0]]
)
async def test_too_many_entries_are_refused_before_any_is_read(
    method: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("it takes seconds to read them")

    for name in ("generate_service.request_from_proto", "generate_service.batch_from_proto"):
        monkeypatch.setattr(f"cluster.api.grpc.{name}", read)
    for name in ("conversions.embed.prompt_from_proto", "model_service.prompt_from_proto"):
        monkeypatch.setattr(f"cluster.api.grpc.{name}", read)
    async with answering_ingress() as (channel, _, _):
        refused = await status_of(channel, METHODS[method], on_the_wire(make))
    assert refused is not None
    assert refused.code() is INVALID, refused.details()
