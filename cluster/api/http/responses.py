"""What clients get, in OpenAI's shapes; UNSET fields are left out."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, frozen=True):
    """What went wrong. param: the field of the request, code: for programs"""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """Of every answer that is an error."""

    error: ErrorDetail


class PromptTokensDetails(Struct, frozen=True):
    """cached_tokens: came from a prefix cache"""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of all choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """Of completions. text_offset: where each token begins, in characters of the choice's text

    None: of the first token of a prompt that is echoed, which follows nothing
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True):
    """vLLM's, of a token of a prompt, or one that could have been. rank: 1 is the most likely"""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token id; None: of the first, which follows nothing."""


class CompletionChoice(Struct):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """An answer of /v1/completions, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    """A token that could have been. bytes: of its text"""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """arguments: JSON, as the model wrote it"""

    name: str
    arguments: str


class ToolCall(Struct):
    """What the model asks for."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct):
    """A whole answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

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
    """name: in a call's first delta"""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What is new of a call. id, type: in its first delta"""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """A chunk of a stream of /v1/chat/completions. prompt_token_ids, prompt_logprobs: in the first"""

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
    """Of one input. embedding: numbers, or base64 of float32"""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """Of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Classified(Struct, frozen=True):
    """Of one input: the class that it is most likely of, and how likely it is of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(Struct, frozen=True):
    """Of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Scored(Struct, frozen=True):
    """Of one document."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True):
    """Of /score."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class TextDocument(Struct, frozen=True):
    """As it was sent."""

    text: str


class RankedDocument(Struct, frozen=True):
    """index: its place among those that were sent"""

    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class RerankedList(Struct, frozen=True):
    """Of /rerank."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class EmbeddingList(Struct, frozen=True):
    """Of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Model(Struct, frozen=True):
    """A model that is served.

    max_model_len: tokens of prompt and output together; parent: of a LoRA adapter
    sampling_defaults: sampling parameters of requests that do not give them, as generation_config.json names them
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "raypd"
    parent: str | UnsetType = UNSET
    sampling_defaults: dict[str, float] | UnsetType = UNSET


class ModelList(Struct, frozen=True):
    """Of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct, frozen=True):
    """Of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """Of /detokenize."""

    prompt: str


class Health(Struct, frozen=True):
    """Of /health, /ping and /ready."""

    status: str


class Version(Struct, frozen=True):
    """Of /version."""

    version: str
