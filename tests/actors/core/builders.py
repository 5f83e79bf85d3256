"""Schedulers and requests for tests, with a clock that tests set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from actors.core.loads.embedding_transfers import Staging
from actors.core.loads.transfer_parts import TransferParts
from actors.core.requests.abilities import Ability
from actors.core.requests.adapter import Adapter
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHasher
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds, Request
from actors.core.requests.sampling_params import PoolingParams, SamplingParams, StructuredOutputParams
from actors.core.requests.structured_output import StructuredOutputManager
from actors.core.scheduler import Scheduler
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.interface import KVConnectorScheduler
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.prefix.prefix_sources import PrefixSources

BLOCK_SIZE = 4
_HASHER = BlockHasher(BLOCK_SIZE, PUBLIC_KEY)
EOS = 0


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    policy: Literal["fcfs", "priority"] = "fcfs",
    watermark: float = 0.0,
    enable_prefix_caching: bool = True,
    overlap: bool = False,
    max_loras: int = 4,
    max_lora_wait_s: float = 5.0,
    num_speculative_tokens: int = 0,
    speculative: SpeculativeConfig | None = None,
    num_lookahead_tokens: int = 0,
    priority_ageing_s: float | None = None,
    fairness: Literal["none", "ingress", "tenant"] = "ingress",
    encoder_budget: int = 16,
    encoder_cache_size: int = 16,
    enable_kv_events: bool = True,
    structured_output: StructuredOutputManager | None = None,
    worker_abilities: Iterable[Ability] = frozenset(Ability),
    connector: KVConnectorScheduler | None = None,
    prefix_sources: PrefixSources | None = None,
    load_failure_policy: Literal["recompute", "fail"] = "recompute",
    handoff_timeout_s: float = 10.0,
    staging: Staging | None = None,
    num_state_blocks: int = 0,
    clock: Clock | None = None,
) -> Scheduler:
    if num_speculative_tokens:
        speculative = SpeculativeConfig(num_tokens=num_speculative_tokens)
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=policy,
            watermark=watermark,
            overlap=overlap,
            max_loras=max_loras,
            max_lora_wait_s=max_lora_wait_s,
            speculative=speculative,
            num_lookahead_tokens=num_lookahead_tokens,
            priority_ageing_s=priority_ageing_s,
            fairness=fairness,
            max_num_encoder_input_tokens=encoder_budget,
            encoder_cache_size=encoder_cache_size,
        ),
        CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching, enable_kv_events=enable_kv_events
        ),
        num_blocks,
        max_model_len,
        structured_output=structured_output,
        worker_abilities=worker_abilities,
        transfers=TransferParts(
            connector=connector,
            prefix_sources=prefix_sources,
            staging=staging,
            config=KVTransferConfig(load_failure_policy=load_failure_policy, handoff_timeout_s=handoff_timeout_s),
        ),
        num_state_blocks=num_state_blocks,
        clock=clock or Clock(),
    )


def ticket(role: TransferRole, request_id: str) -> KVTransferParams:
    return KVTransferParams(f"t-{request_id}", 0, role, EngineAddress("peer", 1, "127.0.0.1:1"))


def make_request(
    request_id: str,
    prompt: int | Sequence[int] = 8,
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    output_token_ids: Sequence[int] = (),
    priority: int = 0,
    arrival_time_s: float = 0.0,
    deadline_s: float | None = None,
    cache_salt: str | None = None,
    tenant: str = "",
    lora_name: str | None = None,
    structured_output: StructuredOutputParams | None = None,
    repetition_max_pattern: int = 0,
    pooling_params: PoolingParams | None = None,
    prompt_embeds: PromptEmbeds | None = None,
    mm_features: Sequence[MultiModalFeature] = (),
    role: TransferRole | None = None,
    client_index: int = 0,
    now_s: float = 1000.0,
) -> Request:
    """Make a request. An int as prompt: so many tokens that no other request of another id has."""
    if isinstance(prompt, int):
        first = 1000 + sum(ord(char) * 31**i for i, char in enumerate(request_id)) % 1_000_000
        prompt = range(first, first + prompt)
    core_request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            structured_output=structured_output,
            repetition_max_pattern=repetition_max_pattern,
        ),
        output_token_ids=list(output_token_ids),
        eos_token_ids=(EOS,),
        priority=priority,
        arrival_time_s=arrival_time_s,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        tenant=tenant,
        lora=None if lora_name is None else Adapter(lora_name, f"/adapters/{lora_name}", "0"),
        pooling_params=pooling_params,
        prompt_embeds=prompt_embeds,
        mm_features=tuple(mm_features),
        encoder_inputs=tuple(EncoderInput(mm_hash, {}) for mm_hash in dict.fromkeys(f.mm_hash for f in mm_features)),
        kv_transfer_params=None if role is None else ticket(role, request_id),
    )
    return Request.from_engine_core_request(core_request, client_index, _HASHER, now_s=now_s)
