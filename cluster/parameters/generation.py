"""The requests that the gRPC and the HTTP API make to Serving, and the answers that they get.

Nothing is validated here: the input processor checks requests, and names the fields as they are named here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.core.outputs.engine_core_outputs import RequestTimings
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.access.aims import NO_AIMS, Aims
from cluster.access.caller import Caller, current_caller
from cluster.access.trace_context import TraceContext, current_trace_context
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import NO_OPTIONS, SamplingOptions


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt of plain text; the tokenizer adds its special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids, which are used as they are."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as it was sent: its file's bytes, or a data URI with these in base64."""

    data: bytes = field(default=b"", repr=False)
    data_uri: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    fields: further fields for the chat template, such as tool_calls
    parts:  texts and images in their order, instead of content
    """

    role: str
    content: str
    fields: Mapping[str, JSON] = field(default_factory=dict)
    parts: Sequence[str | ImageInput] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest message first; the model's chat template renders it.

    tools:     JSON schemas of the functions that the model may call, as the template expects them
    variables: further variables for the template, such as enable_thinking
    """

    messages: list[ChatMessage]
    tools: Sequence[JSON] = ()
    variables: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """A prompt of embeddings: one per token, as the model's own embedding layer would make them.

    data:  [num_tokens, hidden_size] of dtype, row by row, little-endian
    dtype: float32 or bfloat16
    """

    data: bytes
    num_tokens: int
    hidden_size: int
    dtype: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for the continuation of one prompt.

    prompt:           None if the client gave none
    images:           the images of a text or of token ids, which have one placeholder for each
    model:            the model's name, or a LoRA adapter's for the model with the adapter; "": the served model
    lora_name:        the adapter's name, beside the model's own name; "": none
    lora_digest:      the digest of the adapter that made output_token_ids, without which the request fails; "": any
    output_token_ids: the output that the client already has; the answer goes on at the next position
    model_version:    the model version that made output_token_ids, without which the request fails; 0: any
    slo:              the request's own service-level aims
    truncate_prompt_tokens: how many of the prompt's last tokens to keep; -1: as many as the output leaves room for
    add_special_tokens: whether the tokenizer adds its special tokens; None: to a text, and not to a conversation
    timeout_s:        how long the client will wait from now on, in seconds, or None
    caller:           the caller, whose limits the request counts against and who shares cached blocks with it
    trace:            the client's span to which the request's trace belongs; None if the client has none
    """

    prompt: Prompt | None
    images: tuple[ImageInput, ...] = ()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model: str = ""
    lora_name: str = ""
    lora_digest: str = ""
    sampling: SamplingOptions = NO_OPTIONS
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    model_version: int = 0
    cache_salt: str = ""
    slo: Aims = NO_AIMS
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    timeout_s: float | None = None
    caller: Caller = field(default_factory=current_caller)
    trace: TraceContext | None = field(default_factory=current_trace_context)


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens of one request. num_cached_tokens: the prompt's tokens that came from a prefix cache"""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine's report on a request. timings: None if the request ended before the engine reported"""

    engine_id: str
    timings: RequestTimings | None


@dataclass(frozen=True, slots=True)
class GenerateTimings:
    """The times of a request, in seconds.

    ttft_s:  the time from the request's arrival at Serving to its first new token; None if there was none
    tpot_s:  the mean time between tokens after the first; None with fewer than two new tokens
    prefill: the prefill engine's report; None if one engine did everything
    decode:  the decode engine's report
    """

    ttft_s: float | None
    tpot_s: float | None
    prefill: EngineReport | None
    decode: EngineReport


@dataclass(frozen=True, slots=True)
class GenerateEnd:
    """How a request ended. stop_reason: the stop string, or the EOS or stop token, if finish_reason is STOP."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: GenerateTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """The output since the last chunk.

    text:           may lag behind token_ids, where text is held back
    first_position: the output position of token_ids[0], counted from the request's very first token
    logprobs:       one entry for each of token_ids, if asked for
    prompt_logprobs: one entry for each token of the prompt but the first, if asked for; only with position 0
    seed:           only in the first chunk
    model_version:  only in the first chunk
    lora_digest:    only in the first chunk, if the request has an adapter
    prompt_token_ids: the prompt as the engines have it; only in the first chunk
    end:            only in the last chunk
    """

    text: str
    token_ids: list[int]
    first_position: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None
    model_version: int | None = None
    lora_digest: str | None = None
    prompt_token_ids: list[int] | None = None
    end: GenerateEnd | None = None
