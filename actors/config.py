"""The settings of an engine, validated where they enter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.lora_config import LoraConfig
from kv_transfer.config import KVTransferConfig


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Settings):
    """Which model, and how it is loaded."""

    model: str = Field(description="Directory of the checkpoint, in Hugging Face format.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV; auto takes the checkpoint's own."
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
        description="auto: requests that do not name temperature, top_k, top_p, min_p, repetition_penalty or "
        "max_tokens get what the checkpoint's generation_config.json says; ignore: raypd's own defaults.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint.")
    seed: int = Field(0, description="Seed of random weights; sampling seeds belong to requests.")


class CacheConfig(_Settings):
    """The KV cache. Of num_blocks, kv_cache_memory_gib and memory_fraction the first that is given decides."""

    block_size: int = Field(16, ge=1, le=1024, description="Tokens in a block.")
    num_blocks: int | None = Field(None, ge=1, description="Number of blocks, for tests and experiments.")
    kv_cache_memory_gib: float | None = Field(
        None, gt=0, description="Memory of the KV cache on each rank, in GiB (2^30 bytes)."
    )
    memory_fraction: float = Field(
        0.25,
        gt=0,
        le=0.95,
        description="Part of the device's free memory, after a profiling run of the largest batch, for the KV "
        "cache. Engines that start "
        "together on one host see the same free memory: their fractions must add up to less than 1.",
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Keep the KV of finished requests, so that prompts that begin in the same way need not compute it.",
    )
    enable_kv_events: bool = Field(
        False,
        description="Tell which blocks the prefix cache stores and forgets. The newest 16384 events, 16 MiB at "
        "most, are kept until they are read; a gap in their numbers tells a reader that older ones were dropped.",
    )


class SpeculativeConfig(_Settings):
    """Guessing a request's next tokens, so that one forward checks several. Tokens are the same with it and without."""

    method: Literal["ngram", "draft_model"] = Field(
        "ngram",
        description="ngram: what followed the last time the same tokens came, in prompt or output. draft_model: what a "
        "smaller model says.",
    )
    num_tokens: int = Field(5, ge=1, le=32, description="Tokens guessed for a request at a time at most.")
    max_step_tokens: int = Field(
        32,
        ge=1,
        description="Tokens guessed for all running requests together, shared evenly: the more run, the fewer each "
        "gets, and with more requests than this nothing is guessed.",
    )
    min_acceptance: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="How likely a guess must be right to be made, as the request's guesses have fared so far. With "
        "one request running; from there it rises, to certainty with max_step_tokens of them.",
    )
    prompt_lookup_min: int = Field(2, ge=1, le=16, description="ngram: the fewest equal tokens that count as a match.")
    prompt_lookup_max: int = Field(4, ge=1, le=16, description="ngram: the most that are looked for; these go first.")
    model: str | None = Field(
        None, description="draft_model: directory of a smaller checkpoint with the same vocabulary."
    )
    cache_tokens: int = Field(
        16384,
        ge=64,
        description="draft_model: tokens whose KV the smaller model keeps; where they do not suffice, who guessed "
        "longest ago starts over.",
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
    """How the grammars of structured output are compiled: in processes beside the engine, which can be ended."""

    num_compilers: int = Field(
        1, ge=1, le=16, description="Processes that compile; each starts when it is first needed, and takes 300 MB."
    )
    compile_timeout_s: float = Field(10.0, gt=0, description="Seconds that compiling one grammar may take.")
    compile_memory_mib: int = Field(1024, ge=64, description="Memory that compiling may take, in MiB.")
    max_compiled_mib: int = Field(64, ge=1, description="Largest compiled grammar, in MiB.")
    cache_mib: int = Field(
        256, ge=0, description="Memory for compiled grammars that are kept for later requests, in MiB."
    )
    max_matching_ms_per_token: float = Field(
        20.0,
        gt=0,
        description="A request ends if following its grammar holds the engine up for longer than this per token, and "
        "two seconds: ambiguous grammars get slower with every token.",
    )
    max_whitespace: int = Field(
        64,
        ge=1,
        description="JSON: characters of whitespace between two tokens at most, so that no model writes whitespace "
        "only.",
    )


class SchedulerConfig(_Settings):
    """The scheduler: token budget, order of requests, fairness, and what runs beside each step."""

    max_num_seqs: int = Field(64, ge=1, description="Requests that run at once.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Token budget: how many tokens one step computes.")
    enable_chunked_prefill: bool = Field(True, description="Cut prompts into chunks that fit the token budget.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="While others wait, a prompt gets at most so many tokens of a step; 0: no such limit."
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Which waiting request comes next: fcfs, the one that came first; priority, the one with the "
        "lowest number as its priority.",
    )
    priority_ageing_s: float | None = Field(
        None, gt=0, description="With policy priority: seconds of waiting that lift a request by one level."
    )
    fairness: Literal["none", "ingress", "tenant"] = Field(
        "ingress",
        description="Who shares what is served, while requests wait: the ingresses that they came through; or tenants, "
        "and the ingresses within each; none: first come, first served, whoever comes.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Share of each tenant; tenants that are not named have 1."
    )
    max_num_encoder_input_tokens: int = Field(
        2048, ge=0, description="Image embeddings that the encoder makes in one step."
    )
    encoder_cache_size: int = Field(2048, ge=0, description="Image embeddings that an engine keeps.")
    encode_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long an encode engine has for an image, in seconds; then the engine that prefills encodes "
        "the image.",
    )
    max_loras: int = Field(4, ge=1, le=64, description="LoRA adapters in one batch; requests for others wait.")
    max_lora_wait_s: float = Field(
        5.0,
        ge=0,
        description="How long an adapter may be without a slot of the batch while requests wait for it; then requests "
        "of the adapter that has had one longest wait until the slot has been given over.",
    )
    grammar_timeout_s: float = Field(
        30.0, gt=0, description="How long a request waits for its grammar: for a compiler, and for the compiling."
    )
    grammar: GrammarConfig = Field(
        GrammarConfig(),
        description="How the grammars of structured output are compiled, in processes beside the engine.",
    )
    speculative: SpeculativeConfig | None = Field(
        None, description="Guess tokens ahead, in engines that generate; default: do not."
    )
    max_prompt_logprobs_per_step: int = Field(
        256,
        ge=1,
        description="Prompt tokens in a step whose requests want log-probabilities of them: each takes logits of the "
        "whole vocabulary. Such prompts are cut to it.",
    )
    num_lookahead_tokens: int = Field(
        0, ge=0, description="Slots that a running request has beyond its step, for a drafter that writes there."
    )
    overlap: bool | None = Field(
        None,
        description="Schedule a step while the one before it runs. Tokens are the same either way. Default: where the "
        "device runs by itself, that is on a GPU.",
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
        10.0, gt=0, description="How long a rank waits for another within a step, before the engine counts as broken."
    )
    rank_start_timeout_s: float = Field(
        300.0, gt=0, description="How long ranks wait for each other while an engine loads its model."
    )
    num_threads: int = Field(
        0, ge=0, description="CPU threads for the tensor operations of each rank; 0: torch's default."
    )


class EngineConfig(_Settings):
    """Everything that one engine needs to know."""

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
