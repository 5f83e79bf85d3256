"""The types of options of requests for vectors, and the messages that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypedDict

from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2
from cluster.client.options import Prompt, set_prompt

Prompts = str | Sequence[Prompt]
"""The inputs of a request: several prompts, or one text."""


class VectorOptions(TypedDict, total=False):
    """The options of all requests for vectors: fields that raypd/v1/embed.proto describes, and timeout_s.

    timeout_s: seconds for the whole call, including waits and further tries; None or absent: no limit
    """

    request_id: str
    model: str
    priority: int
    cache_salt: str
    model_version: int
    truncate_prompt_tokens: int
    timeout_s: float | None


class EmbedOptions(VectorOptions, total=False):
    """The options of requests for embeddings. Where an option is absent, the checkpoint's files decide.

    pooling:    how the hidden states of an input's tokens become one vector
    normalize:  whether embeddings are scaled to length 1
    dimensions: the number of components to keep of each embedding; absent: all of them
    """

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    dimensions: int


class HeadOptions(VectorOptions, total=False):
    """The options of requests to a classification head. raw_logits: whether to return its logits instead of scores"""

    raw_logits: bool


_POOLINGS: Final = {
    "last": embed_pb2.POOLING_LAST,
    "mean": embed_pb2.POOLING_MEAN,
    "cls": embed_pb2.POOLING_CLS,
}


def make_embed_request(inputs: Prompts, options: EmbedOptions) -> embed_pb2.EmbedRequest:
    """Make the message of a request for embeddings.

    Raises ValueError or TypeError for an option that does not exist or whose field cannot hold the value.
    """
    fields = _fields_of(options)
    if (pooling := fields.pop("pooling", None)) is not None:
        if pooling not in _POOLINGS:
            raise ValueError(f"pooling is {pooling!r}; allowed: {', '.join(_POOLINGS)}")
        fields["pooling"] = _POOLINGS[pooling]
    return embed_pb2.EmbedRequest(inputs=_prompts(inputs), **fields)


def make_classify_request(inputs: Prompts, options: HeadOptions) -> embed_pb2.ClassifyRequest:
    """Make the message of a request for classes. Raises ValueError or TypeError as make_embed_request() does."""
    return embed_pb2.ClassifyRequest(inputs=_prompts(inputs), **_fields_of(options))


def make_score_request(query: Prompt, documents: Prompts, options: HeadOptions) -> embed_pb2.ScoreRequest:
    """Make the message of a request for scores. Raises ValueError or TypeError as make_embed_request() does."""
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
