"""What clients send, in OpenAI's words and vLLM's. Unknown fields are refused: what is ignored would not be done.

Types are checked here; values by the input processor, as for gRPC. Every list has a length
that none exceeds, whatever the limits of a cluster are: the first entry that is wrong, or one too many, ends the check
of a list, so that its cost has a bound (cluster/api/http/receiving has the bounds on all entries together).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Optional, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, SkipValidation, create_model
from pydantic_core import PydanticCustomError

from cluster.parameters.sampling_options import PARAMETERS

MAX_LENGTH: Final = 1 << 14
"""Entries of a list or an object, other than tokens."""
MAX_TOKENS: Final = 1 << 19
"""Tokens of a list of them."""

MAX_CALLS: Final = 1024
"""Tool calls of a message."""
MAX_NAME_CHARS: Final = 1024
"""Characters of a name, which errors may repeat."""

_T = TypeVar("_T")
_V = TypeVar("_V")


def _with_numbers_as_keys(value: object) -> object:
    """JSON's keys are strings."""
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
"""Its parser has made it: to look at each value again would take as long as there are many."""
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Items = Annotated[list[_T], Field(max_length=MAX_LENGTH, fail_fast=True)]
Entries = Annotated[dict[str, _V], Field(max_length=MAX_LENGTH)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
NumberedEntries = Annotated[dict[int, _V], BeforeValidator(_with_numbers_as_keys), Field(max_length=MAX_LENGTH)]
Texts = Annotated[str | Items[str], Field(union_mode="left_to_right")]
Prompts = Annotated[str | Items[str] | TokenIds | Items[TokenIds], Field(union_mode="left_to_right")]


class Body(BaseModel):
    """Of a request."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


TIMEOUT_HEADER: Final = "x-request-timeout"
MAX_TIMEOUT_S: Final = 10_000_000.0


class WorkBody(Body):
    """Of a request that engines work on. timeout: seconds from the call's arrival, after which it is aborted"""

    model: Name = ""
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: Name | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


class StreamOptions(Body):
    """Of a stream. include_usage: a last chunk counts tokens; continuous_usage_stats: so does every other, so far"""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A form for the output."""

    name: str
    description: str | None = None
    json_schema: Entries[AnyJson] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JsonValue object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JsonValue by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's way to say what the output has to be: one of them."""

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
"""The types of fields whose values are not of the parameter's own type before they are read."""


def _with_sampling_parameters(model: type[_BodyT]) -> type[_BodyT]:
    """Give a model a field for each sampling parameter that it does not declare itself."""
    missing = [one for one in PARAMETERS.values() if not one.other_words.http and one.name not in model.model_fields]
    added: dict[str, Any] = {one.name: (Optional[_HTTP_TYPES.get(one.kind, one.kind)], None) for one in missing}  # noqa: UP045  # a type of a value
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)


@_with_sampling_parameters
class GenerationBody(WorkBody):
    """The fields that completions and chat completions have in common; those of sampling parameters are added.

    Some of OpenAI's and vLLM's parameters may have only the value that asks for what is done anyway.
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
    """Of /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    suffix: None = None
    logprobs: int | None = None


class VectorBody(WorkBody):
    """Of a request for embeddings, or for what a classification head says."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["right"] | None = None


class EmbeddingRequest(VectorBody):
    """Of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Name | None = None
    normalize: bool | None = None


class ActivatedBody(VectorBody):
    """Of a request for what a classification head says. activation, use_activation: False for the head's numbers"""

    activation: bool | None = None
    use_activation: bool | None = None


class ClassifyBody(ActivatedBody):
    """Of /classify."""

    input: Prompts


class ScoreBody(ActivatedBody):
    """Of /score: one text and those that it is compared with, or as many of both."""

    text_1: Texts
    text_2: Texts


class RerankBody(ActivatedBody):
    """Of /rerank. top_n: so many of the best; 0: all"""

    query: str
    documents: Items[str]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None


class TextPart(Body):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image in itself: a data URI. Nothing is fetched. detail: a model's own matter"""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    """Part of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Body):
    """What the model had asked for."""

    name: str
    arguments: str


class ToolCall(Body):
    """Of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A turn of a conversation. Fields that answers have, and that say nothing to a model, have to be null."""

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
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """Which one."""

    name: Name


class NamedToolChoice(Body):
    """The model has to call this one."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    """Of /v1/chat/completions."""

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
    """Of /tokenize: a prompt, or a conversation."""

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
    """Of /detokenize."""

    model: Name = ""
    tokens: TokenIds
