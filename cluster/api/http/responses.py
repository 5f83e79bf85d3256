"""The bodies of answers, in OpenAI's shapes. UNSET fields are left out."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, frozen=True):
    """An error. param: the request's field that is at fault; code: the kind of error, for programs"""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


class PromptTokensDetails(Struct, frozen=True):
    """Details of a prompt's tokens. cached_tokens: how many came from a prefix cache"""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """The number of tokens of all choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """The log-probabilities of a completion; None for the first token of an echoed prompt.

    text_offset: where each token begins, in characters of the choice's text
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True):
    """The log-probability of a token of a prompt, or of an alternative to it, as in vLLM. rank: 1 is the most likely"""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt its log-probability and those of alternatives, by token id; None for the first token."""


class CompletionChoice(Struct):
    """One choice of a completion, or the new part of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """An answer of /v1/completions, or a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens at a position. bytes: the UTF-8 bytes of its text"""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A token of the output with its log-probability, and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The log-probabilities of a chat completion."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """The function of a tool call. arguments: JSON text, as the model wrote it"""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call that the model makes."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct):
    """The whole message of a choice."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """An answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunctionDelta(Struct):
    """The new part of a tool call's function. name: only in the first delta of a call"""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The new part of a tool call. id, type: only in the first delta of a call"""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    """The new part of a choice's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """A chunk of a stream of /v1/chat/completions. prompt_token_ids, prompt_logprobs: only in the first chunk"""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Embedding(Struct, frozen=True):
    """The embedding of one input. embedding: numbers, or the base64 of float32 numbers"""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """The number of tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class Classified(Struct, frozen=True):
    """The classification of one input. label: the most likely class; probs: the probability (or logit) of each class"""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(Struct, frozen=True):
    """An answer of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Scored(Struct, frozen=True):
    """The score of one document."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True):
    """An answer of /score."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class TextDocument(Struct, frozen=True):
    """A document, as the client sent it."""

    text: str


class RankedDocument(Struct, frozen=True):
    """A document with its score. index: its index among the documents that the client sent"""

    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class RerankedList(Struct, frozen=True):
    """An answer of /rerank."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class EmbeddingList(Struct, frozen=True):
    """An answer of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Model(Struct, frozen=True):
    """A model that is served.

    max_model_len: the most tokens of prompt and output together
    parent: the base model of a LoRA adapter
    sampling_defaults: the sampling parameters of requests that do not give them, from generation_config.json
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "raypd"
    parent: str | UnsetType = UNSET
    sampling_defaults: dict[str, float] | UnsetType = UNSET


class ModelList(Struct, frozen=True):
    """An answer of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct, frozen=True):
    """An answer of /tokenize. token_strs: the tokens as the tokenizer writes them, if they were asked for"""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """An answer of /detokenize."""

    prompt: str


class Health(Struct, frozen=True):
    """An answer of /health, /ping and /ready."""

    status: str


class Version(Struct, frozen=True):
    """An answer of /version."""

    version: str
