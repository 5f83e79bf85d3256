# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedsDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDS_DTYPE_UNSPECIFIED: _ClassVar[EmbedsDtype]
    EMBEDS_DTYPE_FLOAT32: _ClassVar[EmbedsDtype]
    EMBEDS_DTYPE_BFLOAT16: _ClassVar[EmbedsDtype]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class RequestStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATUS_UNSPECIFIED: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING_FOR_FSM: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING_FOR_REMOTE_KVS: _ClassVar[RequestStatus]
    REQUEST_STATUS_RUNNING: _ClassVar[RequestStatus]
    REQUEST_STATUS_PREEMPTED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED_STOPPED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED_LENGTH_CAPPED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED_ABORTED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED_IGNORED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED_ERROR: _ClassVar[RequestStatus]
EMBEDS_DTYPE_UNSPECIFIED: EmbedsDtype
EMBEDS_DTYPE_FLOAT32: EmbedsDtype
EMBEDS_DTYPE_BFLOAT16: EmbedsDtype
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
REQUEST_STATUS_UNSPECIFIED: RequestStatus
REQUEST_STATUS_WAITING: RequestStatus
REQUEST_STATUS_WAITING_FOR_FSM: RequestStatus
REQUEST_STATUS_WAITING_FOR_REMOTE_KVS: RequestStatus
REQUEST_STATUS_RUNNING: RequestStatus
REQUEST_STATUS_PREEMPTED: RequestStatus
REQUEST_STATUS_FINISHED_STOPPED: RequestStatus
REQUEST_STATUS_FINISHED_LENGTH_CAPPED: RequestStatus
REQUEST_STATUS_FINISHED_ABORTED: RequestStatus
REQUEST_STATUS_FINISHED_IGNORED: RequestStatus
REQUEST_STATUS_FINISHED_ERROR: RequestStatus

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "last")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    last: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("records", "unanswered", "left_out")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[str]
    unanswered: _containers.RepeatedCompositeFieldContainer[UnansweredIngress]
    left_out: int
    def __init__(self, records: _Optional[_Iterable[str]] = ..., unanswered: _Optional[_Iterable[_Union[UnansweredIngress, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class UnansweredIngress(_message.Message):
    __slots__ = ("ingress", "reason")
    INGRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ingress: str
    reason: str
    def __init__(self, ingress: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "prompt_embeds", "sampling_params", "priority", "output_token_ids", "cache_salt", "model_version", "lora_name", "lora_digest", "images", "truncate_prompt_tokens", "add_special_tokens", "slo")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    prompt_embeds: PromptEmbeds
    sampling_params: SamplingParams
    priority: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    model_version: int
    lora_name: str
    lora_digest: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    truncate_prompt_tokens: int
    add_special_tokens: bool
    slo: Slo
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., prompt_embeds: _Optional[_Union[PromptEmbeds, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., model_version: _Optional[int] = ..., lora_name: _Optional[str] = ..., lora_digest: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_ms", "itl_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    itl_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., itl_ms: _Optional[float] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "data_uri")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_URI_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    data_uri: str
    def __init__(self, data: _Optional[bytes] = ..., data_uri: _Optional[str] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("prompts", "n", "best_of", "each")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    n: int
    best_of: int
    each: GenerateRequest
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., each: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "prompt_embeds")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    prompt_embeds: PromptEmbeds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., prompt_embeds: _Optional[_Union[PromptEmbeds, _Mapping]] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("prompt_index", "sample_index", "response", "cumulative_logprob")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    sample_index: int
    response: GenerateResponse
    cumulative_logprob: float
    def __init__(self, prompt_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptEmbeds(_message.Message):
    __slots__ = ("data", "num_tokens", "hidden_size", "dtype")
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    num_tokens: int
    hidden_size: int
    dtype: EmbedsDtype
    def __init__(self, data: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[_Union[EmbedsDtype, str]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs", "logit_bias", "prompt_logprobs", "skip_special_tokens", "json_schema", "json_object", "regex", "choice", "grammar", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    prompt_logprobs: int
    skip_special_tokens: bool
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "first_position", "logprobs", "finish_reason", "stop_string", "stop_token_id", "usage", "timings", "seed", "model_version", "prompt_logprobs", "lora_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    timings: Timings
    seed: int
    model_version: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    lora_digest: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., seed: _Optional[int] = ..., model_version: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., lora_digest: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top", "token_id")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    token_id: int
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., token_id: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("ttft_s", "tpot_s", "queued_s", "prefill_s", "transfer", "prefill_engine", "decode_engine")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    queued_s: float
    prefill_s: float
    transfer: Transfer
    prefill_engine: EngineTimings
    decode_engine: EngineTimings
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., prefill_engine: _Optional[_Union[EngineTimings, _Mapping]] = ..., decode_engine: _Optional[_Union[EngineTimings, _Mapping]] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("kv_bytes", "transfer_s", "exposed_s")
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    transfer_s: float
    exposed_s: float
    def __init__(self, kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ...) -> None: ...

class EngineTimings(_message.Message):
    __slots__ = ("engine_id", "queued_s", "prefill_s", "computed_prompt_tokens", "cached_tokens", "preemptions", "status_changes", "fetched_images")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STATUS_CHANGES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    queued_s: float
    prefill_s: float
    computed_prompt_tokens: int
    cached_tokens: int
    preemptions: int
    status_changes: _containers.RepeatedCompositeFieldContainer[StatusChange]
    fetched_images: int
    def __init__(self, engine_id: _Optional[str] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., status_changes: _Optional[_Iterable[_Union[StatusChange, _Mapping]]] = ..., fetched_images: _Optional[int] = ...) -> None: ...

class StatusChange(_message.Message):
    __slots__ = ("status", "at_s")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    status: RequestStatus
    at_s: float
    def __init__(self, status: _Optional[_Union[RequestStatus, str]] = ..., at_s: _Optional[float] = ...) -> None: ...
