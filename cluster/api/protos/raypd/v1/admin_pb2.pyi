# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RotateSecretRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateSecretResponse(_message.Message):
    __slots__ = ("is_old_refused",)
    IS_OLD_REFUSED_FIELD_NUMBER: _ClassVar[int]
    is_old_refused: bool
    def __init__(self, is_old_refused: _Optional[bool] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("engine_id", "preempt")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    preempt: bool
    def __init__(self, engine_id: _Optional[str] = ..., preempt: _Optional[bool] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("reset_engine_ids", "busy_engine_ids")
    RESET_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    reset_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    busy_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reset_engine_ids: _Optional[_Iterable[str]] = ..., busy_engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("engine_id", "duration_seconds", "with_trace")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITH_TRACE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    duration_seconds: float
    with_trace: bool
    def __init__(self, engine_id: _Optional[str] = ..., duration_seconds: _Optional[float] = ..., with_trace: _Optional[bool] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("summary", "trace")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    summary: str
    trace: bytes
    def __init__(self, summary: _Optional[str] = ..., trace: _Optional[bytes] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "directory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("engine_ids",)
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("model_version",)
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model_version: int
    def __init__(self, model_version: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "both", "encode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    BOTH_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    both: int
    encode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., both: _Optional[int] = ..., encode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("engine_ids",)
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine_id", "for_good")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    FOR_GOOD_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    for_good: bool
    def __init__(self, engine_id: _Optional[str] = ..., for_good: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("engine_id", "role")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    role: str
    def __init__(self, engine_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "server_version", "membership_version", "engines", "requests", "decisions", "controller_error", "refused_pairs", "ingresses", "migrations", "models", "update", "routing", "planner", "prefix_indexes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    INGRESSES_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_INDEXES_FIELD_NUMBER: _ClassVar[int]
    model: str
    server_version: str
    membership_version: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInFlight]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    controller_error: str
    refused_pairs: _containers.RepeatedCompositeFieldContainer[RefusedPair]
    ingresses: _containers.RepeatedCompositeFieldContainer[IngressStatus]
    migrations: int
    models: _containers.RepeatedCompositeFieldContainer[ModelVersionStatus]
    update: str
    routing: RoutingStatus
    planner: PlannerStatus
    prefix_indexes: _containers.RepeatedCompositeFieldContainer[PrefixIndexStatus]
    def __init__(self, model: _Optional[str] = ..., server_version: _Optional[str] = ..., membership_version: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestInFlight, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., controller_error: _Optional[str] = ..., refused_pairs: _Optional[_Iterable[_Union[RefusedPair, _Mapping]]] = ..., ingresses: _Optional[_Iterable[_Union[IngressStatus, _Mapping]]] = ..., migrations: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelVersionStatus, _Mapping]]] = ..., update: _Optional[str] = ..., routing: _Optional[_Union[RoutingStatus, _Mapping]] = ..., planner: _Optional[_Union[PlannerStatus, _Mapping]] = ..., prefix_indexes: _Optional[_Iterable[_Union[PrefixIndexStatus, _Mapping]]] = ...) -> None: ...

class PlannerStatus(_message.Message):
    __slots__ = ("mode", "age_seconds", "action", "current", "target", "steps", "reason", "findings", "prefill_work", "decode_work", "prefill_work_high", "decode_work_high", "forecast_error", "least_engines", "estimated_by")
    MODE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORK_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORK_HIGH_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORK_HIGH_FIELD_NUMBER: _ClassVar[int]
    FORECAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LEAST_ENGINES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_BY_FIELD_NUMBER: _ClassVar[int]
    mode: str
    age_seconds: float
    action: str
    current: EngineCounts
    target: EngineCounts
    steps: str
    reason: str
    findings: _containers.RepeatedScalarFieldContainer[str]
    prefill_work: float
    decode_work: float
    prefill_work_high: float
    decode_work_high: float
    forecast_error: float
    least_engines: int
    estimated_by: str
    def __init__(self, mode: _Optional[str] = ..., age_seconds: _Optional[float] = ..., action: _Optional[str] = ..., current: _Optional[_Union[EngineCounts, _Mapping]] = ..., target: _Optional[_Union[EngineCounts, _Mapping]] = ..., steps: _Optional[str] = ..., reason: _Optional[str] = ..., findings: _Optional[_Iterable[str]] = ..., prefill_work: _Optional[float] = ..., decode_work: _Optional[float] = ..., prefill_work_high: _Optional[float] = ..., decode_work_high: _Optional[float] = ..., forecast_error: _Optional[float] = ..., least_engines: _Optional[int] = ..., estimated_by: _Optional[str] = ...) -> None: ...

class EngineCounts(_message.Message):
    __slots__ = ("prefill", "decode", "both")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    BOTH_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    both: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., both: _Optional[int] = ...) -> None: ...

class PrefixIndexStatus(_message.Message):
    __slots__ = ("version", "blocks", "size_bytes", "max_bytes", "stride", "lookups", "hits", "events", "gaps", "snapshots")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    blocks: int
    size_bytes: int
    max_bytes: int
    stride: int
    lookups: int
    hits: int
    events: int
    gaps: int
    snapshots: int
    def __init__(self, version: _Optional[int] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., stride: _Optional[int] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., events: _Optional[int] = ..., gaps: _Optional[int] = ..., snapshots: _Optional[int] = ...) -> None: ...

class RoutingStatus(_message.Message):
    __slots__ = ("window_seconds", "requests", "requests_by_way", "regret", "regret_since_start", "ttft_error", "aims_met", "goodput_per_second")
    class RequestsByWayEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BY_WAY_FIELD_NUMBER: _ClassVar[int]
    REGRET_FIELD_NUMBER: _ClassVar[int]
    REGRET_SINCE_START_FIELD_NUMBER: _ClassVar[int]
    TTFT_ERROR_FIELD_NUMBER: _ClassVar[int]
    AIMS_MET_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    window_seconds: float
    requests: int
    requests_by_way: _containers.ScalarMap[str, int]
    regret: float
    regret_since_start: float
    ttft_error: float
    aims_met: float
    goodput_per_second: float
    def __init__(self, window_seconds: _Optional[float] = ..., requests: _Optional[int] = ..., requests_by_way: _Optional[_Mapping[str, int]] = ..., regret: _Optional[float] = ..., regret_since_start: _Optional[float] = ..., ttft_error: _Optional[float] = ..., aims_met: _Optional[float] = ..., goodput_per_second: _Optional[float] = ...) -> None: ...

class ModelVersionStatus(_message.Message):
    __slots__ = ("version", "directory", "engines", "requests", "last_error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    directory: str
    engines: int
    requests: int
    last_error: str
    def __init__(self, version: _Optional[int] = ..., directory: _Optional[str] = ..., engines: _Optional[int] = ..., requests: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class IngressStatus(_message.Message):
    __slots__ = ("number", "incarnation", "state", "address", "node", "last_error", "requests", "http_address", "busy_seconds", "routing", "request_trace")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TRACE_FIELD_NUMBER: _ClassVar[int]
    number: int
    incarnation: int
    state: str
    address: str
    node: str
    last_error: str
    requests: int
    http_address: str
    busy_seconds: float
    routing: RoutingStatus
    request_trace: RequestTraceStatus
    def __init__(self, number: _Optional[int] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., last_error: _Optional[str] = ..., requests: _Optional[int] = ..., http_address: _Optional[str] = ..., busy_seconds: _Optional[float] = ..., routing: _Optional[_Union[RoutingStatus, _Mapping]] = ..., request_trace: _Optional[_Union[RequestTraceStatus, _Mapping]] = ...) -> None: ...

class RequestTraceStatus(_message.Message):
    __slots__ = ("lines", "dropped_lines", "error")
    LINES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LINES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lines: int
    dropped_lines: int
    error: str
    def __init__(self, lines: _Optional[int] = ..., dropped_lines: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RefusedPair(_message.Message):
    __slots__ = ("prefill_engine", "decode_engine", "reason")
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_engine: str
    decode_engine: str
    reason: str
    def __init__(self, prefill_engine: _Optional[str] = ..., decode_engine: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "incarnation", "role", "state", "address", "last_error", "load", "transfers", "links", "stores", "age_seconds", "kv_transport", "node", "model_version", "spec_decoding", "adapters", "embeddings", "attention_backend", "attention_reason", "step_costs", "linear_layers", "cpu_threads", "cuda_graphs", "left_out_inputs", "dtype")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_DECODING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CPU_THREADS_FIELD_NUMBER: _ClassVar[int]
    CUDA_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_INPUTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: int
    role: str
    state: str
    address: str
    last_error: str
    load: EngineLoad
    transfers: TransferStatus
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    stores: StoreStatus
    age_seconds: float
    kv_transport: str
    node: str
    model_version: int
    spec_decoding: SpecDecodingStatus
    adapters: AdapterStatus
    embeddings: EmbeddingStatus
    attention_backend: str
    attention_reason: str
    step_costs: StepCosts
    linear_layers: str
    cpu_threads: str
    cuda_graphs: str
    left_out_inputs: str
    dtype: str
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., last_error: _Optional[str] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., transfers: _Optional[_Union[TransferStatus, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., stores: _Optional[_Union[StoreStatus, _Mapping]] = ..., age_seconds: _Optional[float] = ..., kv_transport: _Optional[str] = ..., node: _Optional[str] = ..., model_version: _Optional[int] = ..., spec_decoding: _Optional[_Union[SpecDecodingStatus, _Mapping]] = ..., adapters: _Optional[_Union[AdapterStatus, _Mapping]] = ..., embeddings: _Optional[_Union[EmbeddingStatus, _Mapping]] = ..., attention_backend: _Optional[str] = ..., attention_reason: _Optional[str] = ..., step_costs: _Optional[_Union[StepCosts, _Mapping]] = ..., linear_layers: _Optional[str] = ..., cpu_threads: _Optional[str] = ..., cuda_graphs: _Optional[str] = ..., left_out_inputs: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("seconds_by_feature", "is_sure", "steps", "drifts", "residuals", "origin", "age_seconds")
    class SecondsByFeatureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SECONDS_BY_FEATURE_FIELD_NUMBER: _ClassVar[int]
    IS_SURE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRIFTS_FIELD_NUMBER: _ClassVar[int]
    RESIDUALS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds_by_feature: _containers.ScalarMap[str, float]
    is_sure: bool
    steps: int
    drifts: int
    residuals: _containers.RepeatedCompositeFieldContainer[StepErrors]
    origin: str
    age_seconds: float
    def __init__(self, seconds_by_feature: _Optional[_Mapping[str, float]] = ..., is_sure: _Optional[bool] = ..., steps: _Optional[int] = ..., drifts: _Optional[int] = ..., residuals: _Optional[_Iterable[_Union[StepErrors, _Mapping]]] = ..., origin: _Optional[str] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class StepErrors(_message.Message):
    __slots__ = ("kind", "steps", "low", "median", "high", "median_size")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_SIZE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    steps: int
    low: float
    median: float
    high: float
    median_size: float
    def __init__(self, kind: _Optional[str] = ..., steps: _Optional[int] = ..., low: _Optional[float] = ..., median: _Optional[float] = ..., high: _Optional[float] = ..., median_size: _Optional[float] = ...) -> None: ...

class EmbeddingStatus(_message.Message):
    __slots__ = ("received", "failed", "sent", "not_sent")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    NOT_SENT_FIELD_NUMBER: _ClassVar[int]
    received: int
    failed: int
    sent: int
    not_sent: int
    def __init__(self, received: _Optional[int] = ..., failed: _Optional[int] = ..., sent: _Optional[int] = ..., not_sent: _Optional[int] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("loaded", "waiting", "loads", "failed_loads", "evictions")
    LOADED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    FAILED_LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    loaded: _containers.RepeatedScalarFieldContainer[str]
    waiting: int
    loads: int
    failed_loads: int
    evictions: int
    def __init__(self, loaded: _Optional[_Iterable[str]] = ..., waiting: _Optional[int] = ..., loads: _Optional[int] = ..., failed_loads: _Optional[int] = ..., evictions: _Optional[int] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running", "waiting", "waiting_for_remote_kvs", "held", "blocks", "free_blocks", "preemptions", "prompt_tokens", "output_tokens", "steps", "prefix_queried_tokens", "prefix_cached_tokens", "prefix_loaded_tokens", "late_completions", "replayed_steps")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_REMOTE_KVS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_STEPS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_for_remote_kvs: int
    held: int
    blocks: int
    free_blocks: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    prefix_queried_tokens: int
    prefix_cached_tokens: int
    prefix_loaded_tokens: int
    late_completions: int
    replayed_steps: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_for_remote_kvs: _Optional[int] = ..., held: _Optional[int] = ..., blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_cached_tokens: _Optional[int] = ..., prefix_loaded_tokens: _Optional[int] = ..., late_completions: _Optional[int] = ..., replayed_steps: _Optional[int] = ...) -> None: ...

class TransferStatus(_message.Message):
    __slots__ = ("sent_bytes", "received_bytes", "sent_chunks", "received_chunks", "completed", "failed", "cancelled", "retries", "stalls", "corrupt_chunks", "links_lost", "mean_transfer_seconds", "mean_exposed_seconds", "active", "pinned_blocks", "oldest_pin_seconds", "dropped_messages")
    class DroppedMessagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_LOST_FIELD_NUMBER: _ClassVar[int]
    MEAN_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    received_bytes: int
    sent_chunks: int
    received_chunks: int
    completed: int
    failed: int
    cancelled: int
    retries: int
    stalls: int
    corrupt_chunks: int
    links_lost: int
    mean_transfer_seconds: float
    mean_exposed_seconds: float
    active: int
    pinned_blocks: int
    oldest_pin_seconds: float
    dropped_messages: _containers.ScalarMap[str, int]
    def __init__(self, sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., sent_chunks: _Optional[int] = ..., received_chunks: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., retries: _Optional[int] = ..., stalls: _Optional[int] = ..., corrupt_chunks: _Optional[int] = ..., links_lost: _Optional[int] = ..., mean_transfer_seconds: _Optional[float] = ..., mean_exposed_seconds: _Optional[float] = ..., active: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., oldest_pin_seconds: _Optional[float] = ..., dropped_messages: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer_engine_id", "peer_incarnation", "end", "state", "active_transfers", "bytes", "age_seconds", "idle_seconds", "last_error")
    PEER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    peer_engine_id: str
    peer_incarnation: int
    end: str
    state: str
    active_transfers: int
    bytes: int
    age_seconds: float
    idle_seconds: float
    last_error: str
    def __init__(self, peer_engine_id: _Optional[str] = ..., peer_incarnation: _Optional[int] = ..., end: _Optional[str] = ..., state: _Optional[str] = ..., active_transfers: _Optional[int] = ..., bytes: _Optional[int] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., last_error: _Optional[str] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("saved_blocks", "unsaved_blocks", "loaded_blocks", "missing_blocks")
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    saved_blocks: int
    unsaved_blocks: int
    loaded_blocks: int
    missing_blocks: int
    def __init__(self, saved_blocks: _Optional[int] = ..., unsaved_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ...) -> None: ...

class SpecDecodingStatus(_message.Message):
    __slots__ = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_tokens_per_pos: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestInFlight(_message.Message):
    __slots__ = ("request_id", "age_seconds", "phase", "prefill_engine", "decode_engine", "prompt_tokens", "output_tokens", "attempt", "migrations", "model_version", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_seconds: float
    phase: str
    prefill_engine: str
    decode_engine: str
    prompt_tokens: int
    output_tokens: int
    attempt: int
    migrations: int
    model_version: int
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., age_seconds: _Optional[float] = ..., phase: _Optional[str] = ..., prefill_engine: _Optional[str] = ..., decode_engine: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempt: _Optional[int] = ..., migrations: _Optional[int] = ..., model_version: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("age_seconds", "text")
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    age_seconds: float
    text: str
    def __init__(self, age_seconds: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...
