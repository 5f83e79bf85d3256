"""What a request for vectors can ask for, typed, and the messages that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypedDict

from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2
from cluster.client.options import Prompt, set_prompt

Prompts = str | Sequence[Prompt]
"""Several prompts, or one text."""


class VectorOptions(TypedDict, total=False):
    """What all such requests have; see raypd/v1/embed.proto. timeout_s: for all of the call"""

    request_id: str
    model: str
    priority: int
    cache_salt: str
    model_version: int
    truncate_prompt_tokens: int
    timeout_s: float | None


class EmbedOptions(VectorOptions, total=False):
    """What is absent is as the checkpoint was made for."""

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    dimensions: int


class HeadOptions(VectorOptions, total=False):
    """raw_logits: instead of scores"""

    raw_logits: bool


_POOLINGS: Final = {
    "last": embed_pb2.POOLING_LAST,
    "mean": embed_pb2.POOLING_MEAN,
    "cls": embed_pb2.POOLING_CLS,
}


def make_embed_request(inputs: Prompts, options: EmbedOptions) -> embed_pb2.EmbedRequest:
    """The message. Raises ValueError or TypeError for a field that does not exist or cannot hold its value."""
    fields = _fields_of(options)
    if (pooling := fields.pop("pooling", None)) is not None:
        if pooling not in _POOLINGS:
            raise ValueError(f"pooling is {pooling!r}; allowed: {', '.join(_POOLINGS)}")
        fields["pooling"] = _POOLINGS[pooling]
    return embed_pb2.EmbedRequest(inputs=_prompts(inputs), **fields)


def make_classify_request(inputs: Prompts, options: HeadOptions) -> embed_pb2.ClassifyRequest:
    """As make_embed_request."""
    return embed_pb2.ClassifyRequest(inputs=_prompts(inputs), **_fields_of(options))


def make_score_request(query: Prompt, documents: Prompts, options: HeadOptions) -> embed_pb2.ScoreRequest:
    """As make_embed_request."""
    [asked] = _prompts([query])
    return embed_pb2.ScoreRequest(query=asked, documents=_prompts(documents), **_fields_of(options))


def _fields_of(options: VectorOptions) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "timeout_s"}


def _prompts(prompts: Prompts) -> list[generate_pb2.Prompt]:
    messages = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        message = generate_pb2.Prompt()
        set_prompt(message, prompt)
        messages.append(message)
    return messages
