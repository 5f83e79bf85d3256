"""Who is let in: a request that can never run here is refused before it waits."""

from __future__ import annotations

from actors.config import SchedulerConfig
from actors.core.encoder_scheduling import find_encoder_refusal
from actors.core.request import Request
from kv_transfer.params import TransferRole


def find_refusal(
    request: Request,
    config: SchedulerConfig,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    has_connector: bool,
    has_grammars: bool,
) -> str | None:
    """Say, with the numbers, why the request could never run in this engine, or return None.

    What passes fits into the empty pool at its full length: the scheduler's progress rests on that.
    """
    if not has_connector and request.kv_transfer_params is not None:
        return "the request takes part in a handoff, but this engine has no connector"
    if request.sampling_params.structured_output is not None and not has_grammars:
        return "structured output is asked for, but this engine compiles no grammars"
    if request.pooling_params is not None and request.kv_transfer_params is not None:
        return "a pooling request has nothing to hand over"
    if (embeds := request.prompt_embeds) is not None and embeds.num_tokens != request.num_prompt_tokens:
        return f"prompt_embeds has {embeds.num_tokens} rows for {request.num_prompt_tokens} prompt tokens"
    if request.mm_features and (mistake := find_encoder_refusal(request, config)) is not None:
        return mistake
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if request.num_tokens >= max_model_len:
        return (
            f"prompt and output so far have {request.num_tokens} tokens, max_model_len is {max_model_len}: "
            "there is no room for another one"
        )
    if request.num_tokens >= request.max_num_tokens:
        return f"max_tokens is {request.max_tokens}: there is nothing to generate"
    is_producer = request.transfer_role is TransferRole.PRODUCER
    num_slots = request.num_tokens if is_producer else request.max_num_tokens
    num_needed_blocks = -(-num_slots // block_size)
    if num_needed_blocks > num_blocks:
        return (
            f"{request.num_tokens} tokens and up to {num_slots - request.num_tokens} more need {num_needed_blocks} "
            f"blocks of {block_size} tokens, the KV cache has {num_blocks}"
        )
    is_cut = not config.enable_chunked_prefill and request.num_prompt_tokens > config.max_num_batched_tokens
    if is_cut and request.transfer_role is not TransferRole.CONSUMER:
        return (
            f"the prompt has {request.num_prompt_tokens} tokens, a step takes max_num_batched_tokens = "
            f"{config.max_num_batched_tokens}, and enable_chunked_prefill is off"
        )
    return None
