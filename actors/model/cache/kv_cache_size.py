"""Chooses the number of blocks of a rank's KV cache. Imports no torch, since `raypd doctor` uses it too."""

from __future__ import annotations

import logging

from actors.config import CacheConfig, SchedulerConfig
from actors.model.errors import KVCacheTooLarge, KVCacheTooSmall

logger = logging.getLogger(__name__)

_BATCHES_WORTH_KEEPING = 4
_CPU_TOKENS_PER_THREAD = 24_576
"""Enough for 12 requests of 2048 tokens, or 64 of 384. More run at once on a GPU, but seldom on one core of a CPU."""
_STATE_BYTES_PER_NUMBER = 1 << 16
_CPU_STATES_PER_THREAD = 16
_CPU_SEQUENCES_WORTH_KEEPING = 4


def unused_head_dim(state_bytes: int) -> int:
    """Return the numbers of K and of V that a token gets in the cache of a model that keeps recurrent states only.

    Nothing uses them. They are so few that a state takes many blocks, and so many that the list of a slot's blocks
    stays short: in 16 bits, a slot has up to 1024 blocks of 16 tokens, and 1024 tokens take a sixteenth of its bytes.
    """
    return -(-state_bytes // _STATE_BYTES_PER_NUMBER)


def choose_num_blocks(
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    block_size_bytes: int,
    max_model_len: int,
    free_memory_bytes: int,
    is_gpu: bool,
    num_threads: int = 1,
    num_state_blocks: int = 0,
) -> int:
    """Return the number of blocks of the cache: num_blocks, or what kv_cache_memory_gib or memory_fraction holds.

    num_threads: the threads of a rank that computes on a CPU; has no effect on a GPU
    num_state_blocks: what each sequence takes for its recurrent state, beside the blocks of its tokens
    A fraction of the free memory is cut at num_useful_blocks().
    Raises KVCacheTooSmall if that is not even one sequence of max_model_len tokens.
    """
    if (num_blocks := cache_config.num_blocks) is not None:
        if num_state_blocks >= num_blocks:
            raise KVCacheTooSmall(
                f"cache.num_blocks is {num_blocks}, but the recurrent state of one request takes {num_state_blocks}"
            )
        return num_blocks
    blocks_per_sequence = _blocks_per_sequence(cache_config, max_model_len) + num_state_blocks
    if cache_config.kv_cache_memory_gib is not None:
        budget_bytes = int(cache_config.kv_cache_memory_gib * (1 << 30))
        num_blocks = budget_bytes // block_size_bytes
    else:
        budget_bytes = int(max(free_memory_bytes, 0) * cache_config.memory_fraction)
        useful = num_useful_blocks(
            cache_config,
            scheduler_config,
            max_model_len=max_model_len,
            is_gpu=is_gpu,
            num_threads=num_threads,
            num_state_blocks=num_state_blocks,
        )
        num_blocks = min(budget_bytes // block_size_bytes, useful)
    if num_blocks < blocks_per_sequence:
        raise KVCacheTooSmall(
            f"the KV cache may take {budget_bytes} bytes, {num_blocks} blocks of {block_size_bytes}, but one sequence "
            f"of max_model_len = {max_model_len} tokens needs {blocks_per_sequence} blocks: lower max_model_len, or "
            "raise kv_cache_memory_gib or memory_fraction"
        )
    logger.info("sized the KV cache", extra={"num_blocks": num_blocks, "size_bytes": num_blocks * block_size_bytes})
    return num_blocks


def num_useful_blocks(
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    max_model_len: int,
    is_gpu: bool,
    num_threads: int = 1,
    num_state_blocks: int = 0,
) -> int:
    """Return how many blocks are worth their memory where no setting names the size of the cache.

    That is four times what the largest batch can use: beyond that only the prefix cache would gain, and a small model
    on a large machine would spend its start on making millions of blocks. On a CPU, 24576 tokens for each thread are
    enough, or four sequences of max_model_len: larger batches are too slow there, and the other processes need the
    memory, too. So are the recurrent states of 16 sequences for each thread.
    """
    per_sequence = _blocks_per_sequence(cache_config, max_model_len) + num_state_blocks
    useful = _BATCHES_WORTH_KEEPING * scheduler_config.max_num_seqs * per_sequence
    if is_gpu:
        return useful
    likely = _CPU_TOKENS_PER_THREAD * num_threads // cache_config.block_size
    likely += _CPU_STATES_PER_THREAD * num_threads * num_state_blocks
    return min(useful, max(likely, _CPU_SEQUENCES_WORTH_KEEPING * per_sequence))


def _blocks_per_sequence(cache_config: CacheConfig, max_model_len: int) -> int:
    return -(-max_model_len // cache_config.block_size)


def check_fits(num_blocks: int, block_size_bytes: int, free_bytes: int) -> None:
    """Refuse a cache that is larger than what its device has free, before the operating system has to find out.

    free_bytes: of the GPU, or of this machine within this container's limit, with the weights loaded
    Raises KVCacheTooLarge with both figures.
    """
    size_bytes = num_blocks * block_size_bytes
    if size_bytes > free_bytes:
        raise KVCacheTooLarge(
            f"the KV cache needs {size_bytes / (1 << 30):.2f} GiB, {num_blocks} blocks of {block_size_bytes} bytes; "
            f"{max(free_bytes, 0) / (1 << 30):.2f} GiB are free: lower cache.kv_cache_memory_gib or num_blocks"
        )
