"""Checks the lengths of a message's lists, before its entries are read.

A message of 16 MiB has room for eight million empty entries. To make Python objects of them would take seconds, in
which the event loop serves no other stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2, model_pb2
from cluster.errors import FieldViolation, InvalidRequest
from cluster.settings.input_limits import InputLimits

MAX_IMAGES: Final = 1024
"""The most images of a request, whatever the cluster's own limit is."""
MAX_TOKENS: Final = 262_144
"""The most tokens of one prompt, or the model's context if that is longer."""
_MAX_CHATS: Final = 5
"""How many conversations of the maximum length one call may have in all."""
_SLICE_MESSAGES: Final = 4000
"""The messages whose parts are counted before the event loop gets a turn, which takes 3 ms."""

_Prompt = generate_pb2.GenerateRequest | generate_pb2.Prompt | model_pb2.TokenizeRequest


async def check_generate(message: generate_pb2.GenerateRequest, limits: InputLimits, max_model_len: int) -> None:
    """Check a request for text. Raises InvalidRequest. max_model_len: the model's context, in tokens"""
    await _check_chats([message], limits, "chat", limits.max_chat_messages)
    _require(len(message.images), MAX_IMAGES, "images", "images")
    _check_tokens([message], "token_ids", max_model_len)
    _require(len(message.output_token_ids), max(max_model_len, MAX_TOKENS), "output_token_ids", "tokens")
    _require(len(message.sampling_params.choice.choices), limits.max_choices, "sampling_params.choice", "texts")


async def check_batch(message: generate_pb2.GenerateBatchRequest, limits: InputLimits, max_model_len: int) -> None:
    """Check a batch. Raises InvalidRequest. max_model_len: the model's context, in tokens"""
    await check_generate(message.each, limits, max_model_len)
    _require(len(message.prompts), limits.max_samples_per_call, "prompts", "samples")
    await _check_chats(message.prompts, limits, "prompts", _MAX_CHATS * limits.max_chat_messages)
    _check_tokens(message.prompts, "prompts", max_model_len)


async def check_vectors(
    message: embed_pb2.EmbedRequest | embed_pb2.ClassifyRequest | embed_pb2.ScoreRequest,
    limits: InputLimits,
    max_model_len: int,
) -> None:
    """Check a request for vectors. Raises InvalidRequest. max_model_len: the model's context, in tokens"""
    if isinstance(message, embed_pb2.ScoreRequest):
        await _check_chats([message.query], limits, "query", limits.max_chat_messages)
        _check_tokens([message.query], "query", max_model_len)
        name, prompts = "documents", message.documents
    else:
        name, prompts = "inputs", message.inputs
    _require(len(prompts), limits.max_inputs, name, "of them")
    await _check_chats(prompts, limits, name, _MAX_CHATS * limits.max_chat_messages)
    _check_tokens(prompts, name, max_model_len)


async def check_tokenize(message: model_pb2.TokenizeRequest, limits: InputLimits) -> None:
    """Check a request for tokens. Raises InvalidRequest."""
    await _check_chats([message], limits, "chat", limits.max_chat_messages)


async def _check_chats(prompts: Sequence[_Prompt], limits: InputLimits, field: str, most: int) -> None:
    num_messages = sum(len(prompt.chat.messages) for prompt in prompts)
    _require(num_messages, most, field, "messages")
    num_parts = num_read = 0
    for prompt in prompts:
        for turn in prompt.chat.messages:
            num_parts += len(turn.parts)
            num_read += 1
            if num_read % _SLICE_MESSAGES == 0:
                await asyncio.sleep(0)
    _require(num_parts, most, field, "parts of messages")


def _check_tokens(
    prompts: Sequence[generate_pb2.GenerateRequest | generate_pb2.Prompt], field: str, max_model_len: int
) -> None:
    longest = max((len(prompt.token_ids.ids) for prompt in prompts), default=0)
    _require(longest, max(max_model_len, MAX_TOKENS), field, "tokens of a prompt")


def _require(count: int, most: int, field: str, what: str) -> None:
    if count > most:
        raise InvalidRequest(FieldViolation(field, f"{count} {what}", f"at most {most} {what}"))
