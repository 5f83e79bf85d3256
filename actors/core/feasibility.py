"""Finds requests that could never run in this engine, which are refused before they wait."""

from __future__ import annotations

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.encoder.encoder_scheduling import find_encoder_refusal
from actors.core.requests.abilities import Ability, needed_abilities
from actors.core.requests.request import Request
from kv_transfer.params import TransferRole


def find_refusal(
    request: Request,
    config: SchedulerConfig,
    abilities: frozenset[Ability],
    kv_cache_manager: KVCacheManager,
    max_model_len: int,
) -> str | None:
    """Say, with the numbers, why the request could never run in this engine, or return None.

    A request that passes fits into the empty block pool at its full length. Otherwise the scheduler might never be
    able to complete the request.
    """
    if missing := needed_abilities(request) - abilities:
        return f"the request needs {' and '.join(sorted(missing))}, which this engine does not have"
    return _find_mistake(request, config) or _find_lack_of_room(request, config, kv_cache_manager, max_model_len)


def _find_mistake(request: Request, config: SchedulerConfig) -> str | None:
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if request.pooling_params is not None and request.kv_transfer_params is not None:
        return "a pooling request has nothing to hand over"
    if (embeds := request.prompt_embeds) is not None and embeds.num_tokens != request.num_prompt_tokens:
        return f"prompt_embeds has {embeds.num_tokens} rows for {request.num_prompt_tokens} prompt tokens"
    if request.prompt_embeds is not None and request.sampling_params.prompt_logprobs is not None:
        return "prompt_embeds are no tokens, so there are no prompt_logprobs of them"
    return find_encoder_refusal(request, config) if request.mm_features else None


def _find_lack_of_room(request: Request, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> str | None:
    # A pooling request samples no token, so it needs no room for one.
    if request.num_tokens >= max_model_len + (request.pooling_params is not None):
        return (
            f"prompt and output so far have {request.num_tokens} tokens, max_model_len is {max_model_len}: "
            "there is no room for another one"
        )
    if request.num_tokens >= request.max_num_tokens:
        return f"max_tokens is {request.max_tokens}: there is nothing to generate"
    num_slots = request.num_tokens if request.computes_prompt_only else request.max_num_tokens
    num_needed_blocks = kv.num_blocks_with_slot(num_slots)
    if num_needed_blocks > kv.block_pool.num_blocks:
        state = f" ({kv.states.num_blocks} of them for the recurrent state)" if kv.states else ""
        return (
            f"{request.num_tokens} tokens and up to {num_slots - request.num_tokens} more need {num_needed_blocks} "
            f"blocks of {kv.block_size} tokens{state}, the KV cache has {kv.block_pool.num_blocks}"
        )
    is_cut = not config.enable_chunked_prefill and request.num_prompt_tokens > config.max_num_batched_tokens
    if is_cut and request.transfer_role is not TransferRole.CONSUMER:
        return (
            f"the prompt has {request.num_prompt_tokens} tokens, a step takes max_num_batched_tokens = "
            f"{config.max_num_batched_tokens}, and enable_chunked_prefill is off"
        )
    return None
