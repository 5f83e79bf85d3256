# mypy: disable-error-code="type-arg"
from cluster.api.protos.raypd.v1 import embed_pb2 as _embed_pb2
from cluster.api.protos.raypd.v1 import generate_pb2 as _generate_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[GetModelResponse]
    def __init__(self, models: _Optional[_Iterable[_Union[GetModelResponse, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: _generate_pb2.ChatMessages
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_generate_pb2.ChatMessages, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "max_model_len", "vocab_size", "eos_token_ids", "has_chat_template", "server_version", "limits", "model_versions", "adapters", "generates", "vectors", "sampling_defaults")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GENERATES_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    server_version: str
    limits: RequestLimits
    model_versions: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterDescription]
    generates: bool
    vectors: VectorDescription
    sampling_defaults: SamplingDefaults
    def __init__(self, model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., server_version: _Optional[str] = ..., limits: _Optional[_Union[RequestLimits, _Mapping]] = ..., model_versions: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[AdapterDescription, _Mapping]]] = ..., generates: _Optional[bool] = ..., vectors: _Optional[_Union[VectorDescription, _Mapping]] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class VectorDescription(_message.Message):
    __slots__ = ("embedding_size", "pooling", "normalize", "matryoshka_dimensions", "labels")
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    MATRYOSHKA_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    embedding_size: int
    pooling: _embed_pb2.Pooling
    normalize: bool
    matryoshka_dimensions: _containers.RepeatedScalarFieldContainer[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, embedding_size: _Optional[int] = ..., pooling: _Optional[_Union[_embed_pb2.Pooling, str]] = ..., normalize: _Optional[bool] = ..., matryoshka_dimensions: _Optional[_Iterable[int]] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class AdapterDescription(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RequestLimits(_message.Message):
    __slots__ = ("default_max_tokens", "max_prompt_chars", "max_chat_messages", "max_stop_strings", "max_stop_string_chars", "max_stop_token_ids", "max_logprobs", "max_logit_bias", "max_grammar_chars", "max_choices", "max_schema_depth", "max_samples", "max_samples_per_call", "max_prompt_logprobs", "max_request_id_chars", "max_cache_salt_bytes", "max_inputs", "max_allowed_token_ids", "max_bad_words", "max_bad_word_chars")
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHAT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMAR_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_SCHEMA_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_ID_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_SALT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORD_CHARS_FIELD_NUMBER: _ClassVar[int]
    default_max_tokens: int
    max_prompt_chars: int
    max_chat_messages: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_token_ids: int
    max_logprobs: int
    max_logit_bias: int
    max_grammar_chars: int
    max_choices: int
    max_schema_depth: int
    max_samples: int
    max_samples_per_call: int
    max_prompt_logprobs: int
    max_request_id_chars: int
    max_cache_salt_bytes: int
    max_inputs: int
    max_allowed_token_ids: int
    max_bad_words: int
    max_bad_word_chars: int
    def __init__(self, default_max_tokens: _Optional[int] = ..., max_prompt_chars: _Optional[int] = ..., max_chat_messages: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_chars: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_grammar_chars: _Optional[int] = ..., max_choices: _Optional[int] = ..., max_schema_depth: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_samples_per_call: _Optional[int] = ..., max_prompt_logprobs: _Optional[int] = ..., max_request_id_chars: _Optional[int] = ..., max_cache_salt_bytes: _Optional[int] = ..., max_inputs: _Optional[int] = ..., max_allowed_token_ids: _Optional[int] = ..., max_bad_words: _Optional[int] = ..., max_bad_word_chars: _Optional[int] = ...) -> None: ...
