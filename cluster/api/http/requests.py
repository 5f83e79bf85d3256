"""The bodies of clients' requests, with OpenAI's fields and vLLM's.

Unknown fields are refused, because a client that names a field expects its effect. Types are checked here, and values
by the input processor, as for gRPC. Every list has a maximum length, whatever the limits of a cluster are: the check of
a list ends at the first wrong entry, or at one entry too many, so that its cost is bounded. cluster/api/http/receiving
bounds the entries of all lists together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Optional, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, SkipValidation, create_model
from pydantic_core import PydanticCustomError

from cluster.parameters.sampling_options import PARAMETERS

MAX_LENGTH: Final = 1 << 14
"""The most entries of a list or an object, other than tokens."""
MAX_TOKENS: Final = 1 << 19
"""The most tokens of a list of tokens."""

MAX_CALLS: Final = 1024
"""The most tool calls of a message."""
MAX_NAME_CHARS: Final = 1024
"""The most characters of a name. Error messages may repeat names."""

_T = TypeVar("_T")
_V = TypeVar("_V")


def _with_numbers_as_keys(value: object) -> object:
    """Make numbers of an object's keys, which are strings in JSON."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LENGTH:
        raise PydanticCustomError("too_long", "at most {most} entries", {"most": MAX_LENGTH})
    return {_number_of(key): each for key, each in value.items()}


def _number_of(key: object) -> object:
    is_number = isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit() and len(key) <= _MAX_DIGITS
    return int(key) if isinstance(key, str) and is_number else key


_MAX_DIGITS: Final = 20

AnyJson = Annotated[JsonValue, SkipValidation]
"""JSON that is not validated again: the parser has made it, and a check of each value would take long for many."""
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Items = Annotated[list[_T], Field(max_length=MAX_LENGTH, fail_fast=True)]
Entries = Annotated[dict[str, _V], Field(max_length=MAX_LENGTH)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
NumberedEntries = Annotated[dict[int, _V], BeforeValidator(_with_numbers_as_keys), Field(max_length=MAX_LENGTH)]
Texts = Annotated[str | Items[str], Field(union_mode="left_to_right")]
Prompts = Annotated[str | Items[str] | TokenIds | Items[TokenIds], Field(union_mode="left_to_right")]


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


TIMEOUT_HEADER: Final = "x-request-timeout"
MAX_TIMEOUT_S: Final = 10_000_000.0


class WorkBody(Body):
    """The body of a request that engines work on. timeout: seconds from the call's arrival until it is aborted"""

    model: Name = ""
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: Name | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


class SloBody(Body):
    """The aims of a request, in milliseconds: to its first token, and from a token to the next one."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


class StreamOptions(Body):
    """Options of a stream.

    include_usage: whether a last chunk reports the usage; continuous_usage_stats: whether every chunk reports it so far
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A JSON schema that the output has to satisfy, with its name."""

    name: str
    description: str | None = None
    json_schema: Entries[AnyJson] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """A response format: any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A response format: any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """A response format: JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """The constraint on the output, with vLLM's names of the fields; exactly one field is given."""

    json_: str | Entries[AnyJson] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None


_BodyT = TypeVar("_BodyT", bound=Body)
_HTTP_TYPES: Final[Mapping[object, object]] = {
    tuple[str, ...]: Items[str],
    tuple[int, ...]: TokenIds,
    dict[int, float]: NumberedEntries[float],
}
"""The body's type of a parameter whose own type differs."""


def _with_sampling_parameters(model: type[_BodyT]) -> type[_BodyT]:
    """Give a model a field for each sampling parameter that it does not declare itself."""
    missing = [one for one in PARAMETERS.values() if not one.other_words.http and one.name not in model.model_fields]
    added: dict[str, Any] = {one.name: (Optional[_HTTP_TYPES.get(one.kind, one.kind)], None) for one in missing}  # noqa: UP045  # a type of a value
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)


@_with_sampling_parameters
class GenerationBody(WorkBody):
    """The fields that completions and chat completions have in common; those of sampling parameters are added.

    Some of OpenAI's and vLLM's parameters may only have the value of the behaviour that raypd has anyway.
    """

    n: int | None = None
    max_tokens: int | None = None
    stop: Texts | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    slo: SloBody | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left"] | None = None
    logits_processors: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Entries[AnyJson] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: None = None
    guided_whitespace_pattern: None = None


class CompletionRequest(GenerationBody):
    """The body of a request to /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    suffix: None = None
    logprobs: int | None = None


class VectorBody(WorkBody):
    """The body of a request for embeddings, or for the output of a classification head."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["right"] | None = None


class EmbeddingRequest(VectorBody):
    """The body of a request to /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Name | None = None
    normalize: bool | None = None


class ActivatedBody(VectorBody):
    """The body of a request for the output of a classification head.

    activation, use_activation: False asks for the head's logits instead of scores
    """

    activation: bool | None = None
    use_activation: bool | None = None


class ClassifyBody(ActivatedBody):
    """The body of a request to /classify."""

    input: Prompts


class ScoreBody(ActivatedBody):
    """The body of a request to /score: one text and the texts that it is compared with, or pairs of texts."""

    text_1: Texts
    text_2: Texts


class RerankBody(ActivatedBody):
    """The body of a request to /rerank. top_n: how many of the best documents to return; 0: all"""

    query: str
    documents: Items[str]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None


class TextPart(Body):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image as a data URI; URLs are not fetched. detail: accepted and ignored"""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    """A part of a message's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Body):
    """The function of a tool call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A turn of a conversation. Fields that answers have and that no chat template reads have to be null."""

    role: Name
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Items[None] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Entries[AnyJson] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: Name


class NamedToolChoice(Body):
    """A tool choice: the model has to call this function."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    """The body of a request to /v1/chat/completions."""

    messages: Items[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Entries[AnyJson] | None = None
    chat_template: None = None
    documents: Items[Entries[str]] | None = None
    mm_processor_kwargs: None = None
    metadata: Entries[str] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: Items[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None
    echo: Literal[False] | None = None


class TokenizeRequest(Body):
    """The body of a request to /tokenize: a prompt, or a conversation."""

    model: Name = ""
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Entries[AnyJson] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of a request to /detokenize."""

    model: Name = ""
    tokens: TokenIds
