"""The KV cache's size and its memory."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from actors.config import CacheConfig, SchedulerConfig
from actors.model.attention.probe import KVGeometry
from actors.model.errors import KVCacheTooSmall
from kv_transfer.layout import KVCacheLayout
from kv_transfer.transports.shared_pool import allocate_shared_pool

logger = logging.getLogger(__name__)

_BATCHES_WORTH_KEEPING = 4


def make_layout(
    geometry: KVGeometry, *, num_blocks: int, block_size: int, dtype: torch.dtype, model_fingerprint: str
) -> KVCacheLayout:
    """The layout of one rank's KV cache."""
    return KVCacheLayout(
        num_blocks=num_blocks,
        num_kv_heads=geometry.num_kv_heads,
        num_layers=geometry.num_layers,
        block_size=block_size,
        head_dim=geometry.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        dtype_size_bytes=dtype.itemsize,
        model_fingerprint=model_fingerprint,
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        num_replicas=geometry.num_replicas,
    )


def allocate_kv_cache(layout: KVCacheLayout, device: torch.device) -> Tensor:
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], zeros.

    Zeros, not whatever memory held: masked keys have weight 0, but 0 times a NaN would be a NaN. On the CPU in a memory
    file if the machine allows, so that engines of the same host read blocks straight out of it.
    """
    if device.type == "cpu":
        try:
            return allocate_shared_pool(layout)
        except OSError as error:
            logger.warning(
                "the KV cache cannot be shared; transfers within the host go over TCP", extra={"reason": str(error)}
            )
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.zeros(layout.shape, dtype=dtype, device=device)


def choose_num_blocks(
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    block_size_bytes: int,
    max_model_len: int,
    free_memory_bytes: int,
) -> int:
    """How many blocks the cache gets: num_blocks, or what kv_cache_memory_gib or memory_fraction holds.

    A fraction of the free memory is cut at four times what the largest batch can use: beyond that only the prefix cache
    would gain, and a small model on a large machine would spend its start on making millions of blocks.
    Raises KVCacheTooSmall if that is not even one sequence of max_model_len tokens.
    """
    if cache_config.num_blocks is not None:
        return cache_config.num_blocks
    blocks_per_sequence = -(-max_model_len // cache_config.block_size)
    if cache_config.kv_cache_memory_gib is not None:
        budget_bytes = int(cache_config.kv_cache_memory_gib * (1 << 30))
        num_blocks = budget_bytes // block_size_bytes
    else:
        budget_bytes = int(max(free_memory_bytes, 0) * cache_config.memory_fraction)
        useful = _BATCHES_WORTH_KEEPING * scheduler_config.max_num_seqs * blocks_per_sequence
        num_blocks = min(budget_bytes // block_size_bytes, useful)
    if num_blocks < blocks_per_sequence:
        raise KVCacheTooSmall(
            f"the KV cache may take {budget_bytes} bytes, {num_blocks} blocks of {block_size_bytes}, but one sequence "
            f"of max_model_len = {max_model_len} tokens needs {blocks_per_sequence} blocks: lower max_model_len, or "
            "raise kv_cache_memory_gib or memory_fraction"
        )
    logger.info("sized the KV cache", extra={"num_blocks": num_blocks, "size_bytes": num_blocks * block_size_bytes})
    return num_blocks
