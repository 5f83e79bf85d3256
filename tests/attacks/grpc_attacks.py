"""Attacks by clients that send by gRPC, to take an ingress down, or others' answers away."""

# ruff: noqa: E501  # tables
from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2, model_pb2
from cluster.client.channel import open_channel
from tests.attacks.target import Attack, Target
from tests.attacks.wire import empties, inside, varint

_TIMEOUT_S: Final = 120.0
"""The first image waits for the start of the process that decodes images, beside two other test processes."""
EMBEDDING_SIZE: Final = 64
"""The size of the embeddings of the model that is attacked."""
OPTIONAL_PROPERTIES: Final = json.dumps({"type": "object", "properties": {f"p{i}": True for i in range(2000)}})
ITSELF: Final = json.dumps({"$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [{"$ref": "#/$defs/a"}] * 64})


async def call(target: Target, method: str, request: Message | bytes, token: str | None = None) -> grpc.StatusCode:
    """Make a call, read all of its answer and return how it ended. method: "GenerateService/Generate", for instance."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    credentials = target.credentials(target.token if token is None else token)
    async with open_channel(target.grpc_address, credentials) as channel:
        stream: Any = channel.unary_stream(f"/raypd.v1.{method}")
        try:
            async for _ in stream(data, timeout=_TIMEOUT_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def sampling(**fields: Any) -> generate_pb2.GenerateRequest:
    """A request for one token that is short but for these fields of its sampling_params."""
    params = generate_pb2.SamplingParams(**({"max_tokens": 1} | fields))
    return generate_pb2.GenerateRequest(text="x", sampling_params=params)


def overlapping_schema(num_enums: int, num_values: int, num_properties: int) -> str:
    """A oneOf of references to enums without a value in common, in each of many properties."""
    enums = {f"e{i}": {"enum": [f"{i}-{j}" for j in range(num_values)]} for i in range(num_enums)}
    one_of = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    properties = {f"p{i}": one_of for i in range(num_properties)}
    return json.dumps({"type": "object", "$defs": enums, "properties": properties}, separators=(",", ":"))


def calls(method: str, make: Callable[[], Message | bytes], num_calls: int = 4) -> Callable[[Target], Awaitable[None]]:
    """Make the same call some times at once. make: its message"""
    once = functools.cache(make)

    async def send(target: Target) -> None:
        await asyncio.gather(*(call(target, method, once()) for _ in range(num_calls)))

    return send


def schemas(text: str) -> Callable[[Target], Awaitable[None]]:
    """Ask for a schema some times at once. Each time it is another text: what is known of a schema is remembered."""
    numbers = itertools.count(1)

    async def send(target: Target) -> None:
        texts = [text + " " * next(numbers) for _ in range(4)]
        await asyncio.gather(*(call(target, GENERATE, sampling(json_schema=one)) for one in texts))

    return send


ENUMS: Final = overlapping_schema(num_enums=64, num_values=50, num_properties=25)
MANY_SCHEMAS: Final = json.dumps({"anyOf": [{}] * 20_000}, separators=(",", ":"))
CONSTANTS: Final = json.dumps({"enum": [0] * 16_000, "type": ["integer"] * 2500}, separators=(",", ":"))
GENERATE: Final = "GenerateService/Generate"
BATCH: Final = "GenerateService/GenerateBatch"
EMBED: Final = "EmbedService/Embed"
SCORE: Final = "EmbedService/Score"
TOKENIZE: Final = "ModelService/Tokenize"
DETOKENIZE: Final = "ModelService/Detokenize"
_Request, _Params, _Messages = generate_pb2.GenerateRequest, generate_pb2.SamplingParams, generate_pb2.ChatMessages
_LARGEST: Final = 16 * 2**20 - 64
"""Bytes that fit into a message."""
_TEXT: Final = "the quick brown fox jumps over a lazy dog; "


def text_of(num_chars: int) -> str:
    return (_TEXT * (num_chars // len(_TEXT) + 1))[:num_chars]


def request(**fields: Any) -> generate_pb2.GenerateRequest:
    """A request for one token."""
    return generate_pb2.GenerateRequest(sampling_params=_Params(max_tokens=1), **fields)


def token_ids(count: int) -> generate_pb2.TokenIds:
    return generate_pb2.TokenIds(ids=[300 + number % 3000 for number in range(count)])


def chat(num_messages: int, content: str) -> generate_pb2.ChatMessages:
    return _Messages(messages=[generate_pb2.ChatMessage(role="user", content=content)] * num_messages)


def parts(num_parts: int) -> generate_pb2.ChatMessages:
    turn = generate_pb2.ChatMessage(role="user", parts=[generate_pb2.ContentPart(text="x")] * num_parts)
    return _Messages(messages=[turn])


def batch(prompts: list[generate_pb2.Prompt], n: int = 1) -> generate_pb2.GenerateBatchRequest:
    each = generate_pb2.GenerateRequest(sampling_params=_Params(max_tokens=1))
    return generate_pb2.GenerateBatchRequest(prompts=prompts, n=n, each=each)


def packed(field: str, numbers: bytes) -> bytes:
    return inside(_Request, field, numbers)


def embeds(num_tokens: int) -> generate_pb2.PromptEmbeds:
    data = b"\0" * (num_tokens * EMBEDDING_SIZE * 4)
    return generate_pb2.PromptEmbeds(
        data=data, num_tokens=num_tokens, hidden_size=EMBEDDING_SIZE, dtype=generate_pb2.EMBEDS_DTYPE_FLOAT32
    )


def prompt(**fields: Any) -> generate_pb2.Prompt:
    return generate_pb2.Prompt(**fields)


SCHEMAS: Final = [
    Attack("a schema whose enums are compared to each other", schemas(ENUMS)),
    Attack("a schema of 20 000 schemas", schemas(MANY_SCHEMAS)),
    Attack("a schema of many constants and types", schemas(CONSTANTS)),
    Attack("regular expressions of 20 000 parentheses", calls(GENERATE, lambda: sampling(regex="(" * 20_000))),
    Attack("a schema of 2000 optional properties", schemas(OPTIONAL_PROPERTIES)),
    Attack("a schema that refers to itself", schemas(ITSELF)),
]
LARGE_PROMPTS: Final = [
    Attack("a text of 4 million characters", calls(GENERATE, lambda: request(text=text_of(4_000_000)), 2)),
    Attack("a text of 4 million emoji", calls(GENERATE, lambda: request(text="😀" * 4_000_000), 2)),
    Attack("a word of 2 million characters", calls(GENERATE, lambda: request(text="x" * 2_000_000), 2)),
    Attack("a million tokens", calls(GENERATE, lambda: request(token_ids=token_ids(1_000_000)), 2)),
    Attack("a million tokens to resume", calls(GENERATE, lambda: request(text="x", output_token_ids=[400] * 1_000_000))),
    Attack("a chat of 10 000 messages", calls(GENERATE, lambda: request(chat=chat(10_000, text_of(300))))),
    Attack("a message of 10 000 parts", calls(GENERATE, lambda: request(chat=parts(10_000)))),
    Attack("embeddings of 12 MiB", calls(GENERATE, lambda: request(prompt_embeds=embeds(49_152)), 2)),
    Attack("4 million characters to tokenize", calls(TOKENIZE, lambda: model_pb2.TokenizeRequest(text=text_of(4_000_000)), 2)),
    Attack("4 million tokens to detokenize", calls(DETOKENIZE, lambda: model_pb2.DetokenizeRequest(token_ids=[400] * 4_000_000), 1)),
    Attack("256 prompts of 60 000 characters", calls(BATCH, lambda: batch([prompt(text=text_of(60_000))] * 256), 1)),
    Attack("256 prompts of 4000 tokens", calls(BATCH, lambda: batch([prompt(token_ids=token_ids(4000))] * 256), 1)),
    Attack("32 samples of 500 000 tokens", calls(BATCH, lambda: batch([prompt(token_ids=token_ids(500_000))], 32), 1)),
    Attack("prompts of 50 000 messages", calls(BATCH, lambda: batch([prompt(chat=chat(10_000, "hello"))] * 5), 1)),
    Attack("2048 inputs of 1900 characters", calls(EMBED, lambda: embed_pb2.EmbedRequest(inputs=[prompt(text=text_of(1900))] * 2048), 1)),
    Attack("4 inputs of a million tokens", calls(EMBED, lambda: embed_pb2.EmbedRequest(inputs=[prompt(token_ids=token_ids(1_000_000))] * 4), 1)),
    Attack("2048 documents", calls(SCORE, lambda: embed_pb2.ScoreRequest(query=prompt(text="x"), documents=[prompt(text=text_of(1900))] * 2048), 1)),
]  # fmt: skip
PARAMETERS: Final = [
    Attack("as many parameters of each kind as there may be", calls(GENERATE, lambda: sampling(**MANY_PARAMETERS))),
    Attack("1024 choices of 64 characters", calls(GENERATE, lambda: sampling(choice=generate_pb2.Choices(choices=["x" * 60] * 1024)))),
]  # fmt: skip
MANY_PARAMETERS: Final[dict[str, Any]] = {
    "stop": ["x" * 256] * 16,
    "stop_token_ids": list(range(300, 364)),
    "logit_bias": dict.fromkeys(range(300, 1324), 1.0),
    "allowed_token_ids": [300 + number % 3000 for number in range(16_384)],
    "bad_words": [text_of(256 - number % 8) for number in range(256)],
}
MANY_BIASES: Final = b"".join(
    inside(_Params, "logit_bias", b"\x08" + varint(2**14 + number) + b"\x15\0\0\0\0") for number in range(2**20)
)
MANY_ENTRIES: Final = [
    Attack("5 million empty images", calls(GENERATE, lambda: empties(_Request, "images", _LARGEST // 3), 2)),
    Attack("8 million empty turns", calls(GENERATE, lambda: inside(_Request, "chat", empties(_Messages, "messages", _LARGEST // 2)), 2)),
    Attack("4 million chats", calls(GENERATE, lambda: inside(_Request, "chat", empties(_Messages, "messages", 1)) * (_LARGEST // 4), 2)),
    Attack("8 million empty stop strings", calls(GENERATE, lambda: inside(_Request, "sampling_params", empties(_Params, "stop", _LARGEST // 2)), 2)),
    Attack("16 million tokens of a byte", calls(GENERATE, lambda: inside(_Request, "token_ids", inside(generate_pb2.TokenIds, "ids", b"\1" * _LARGEST)), 2)),
    Attack("16 million tokens to detokenize", calls(DETOKENIZE, lambda: inside(model_pb2.DetokenizeRequest, "token_ids", b"\1" * _LARGEST), 2)),
    Attack("8 million tokens, each a field", calls(GENERATE, lambda: b"\x40\x01" * (_LARGEST // 2), 2)),
    Attack("a million entries of logit_bias", calls(GENERATE, lambda: inside(_Request, "sampling_params", MANY_BIASES), 2)),
    Attack("5 million unknown fields", calls(GENERATE, lambda: b"\xb8\x3e\x01" * (_LARGEST // 3), 2)),
    Attack("4 million unknown groups", calls(GENERATE, lambda: b"\xbb\x3e\xbc\x3e" * (_LARGEST // 4), 2)),
    Attack("8 million empty inputs", calls(EMBED, lambda: empties(embed_pb2.EmbedRequest, "inputs", _LARGEST // 2), 2)),
    Attack("8 million empty prompts", calls(BATCH, lambda: empties(generate_pb2.GenerateBatchRequest, "prompts", _LARGEST // 2), 2)),
]  # fmt: skip
ATTACKS: list[Attack] = [*SCHEMAS, *LARGE_PROMPTS, *PARAMETERS, *MANY_ENTRIES]
