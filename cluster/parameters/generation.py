"""What gRPC and HTTP ask of Serving, and what they get.

Nothing here is validated: the input processor does that, and names the fields as they are named here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.core.outputs.engine_core_outputs import RequestTimings
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.access.caller import Caller, current_caller
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import NO_OPTIONS, SamplingOptions


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; the tokenizer adds its special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as it was sent: its file's bytes, or a data URI with these in base64."""

    data: bytes = field(default=b"", repr=False)
    data_uri: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    fields: what else the chat template may look at, such as tool_calls
    parts:  instead of content: texts and images, in their order
    """

    role: str
    content: str
    fields: Mapping[str, JSON] = field(default_factory=dict)
    parts: Sequence[str | ImageInput] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest message first; the model's chat template renders it.

    tools:     JSON schemas of the functions that the model may call, as the template expects them
    variables: what else the template may look at, such as enable_thinking
    """

    messages: list[ChatMessage]
    tools: Sequence[JSON] = ()
    variables: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """One embedding per token, as the model's own look-up of tokens would give them.

    data: [num_tokens, hidden_size] of dtype, row by row, little-endian
    dtype: float32 or bfloat16
    """

    data: bytes
    num_tokens: int
    hidden_size: int
    dtype: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and how to go on from it.

    prompt:           None if the client gave none
    images:           of a text or of tokens, which have one placeholder for each
    model:            "" asks for the one that is served; the name of a LoRA adapter for that model with it
    lora_name:        the same, beside the model's own name
    lora_digest:      of the adapter that made output_token_ids: no other goes on with them; "": whichever is there
    output_token_ids: the output that the client already has; the answer goes on at the next position
    model_version:    the one that made output_token_ids: no other goes on with them; 0: whichever serves
    truncate_prompt_tokens: only so many of the prompt's last tokens; -1: as many as its output leaves room for
    add_special_tokens: whether the tokenizer adds its own; None: to a text, and not to a conversation
    timeout_s:        how long the client will wait from now on, or None
    caller:           whose limits it counts against, and whose prompts it may share cached blocks with
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
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    timeout_s: float | None = None
    caller: Caller = field(default_factory=current_caller)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. num_cached_tokens: of the prompt, those that came from a prefix cache."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """A request's life in one engine; timings is None if the request left before the engine reported."""

    engine_id: str
    timings: RequestTimings | None


@dataclass(frozen=True, slots=True)
class GenerateTimings:
    """Where a request's time went, in seconds.

    ttft_s:  from the request's arrival at Serving to its first new token; None if there was none
    tpot_s:  mean gap between tokens after the first; None below two new tokens
    prefill: the prefill engine's part; None if one engine did all of it
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
    """What was generated since the last chunk.

    text:           may lag behind token_ids, where it is held back
    first_position: output position of token_ids[0], counted over the request's whole life
    logprobs:       parallel to token_ids, if asked for
    prompt_logprobs: with the token at position 0, if asked for: one for each token of the prompt but the first
    seed:           in the first chunk only
    model_version:  in the first chunk only
    lora_digest:    in the first chunk only, if it has an adapter
    prompt_token_ids: in the first chunk only: the prompt as the engines have it
    end:            in the last chunk only
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
