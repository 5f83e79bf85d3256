"""The KV cache's size and its memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from actors.core.outputs.scheduler_output import BlockCopy
from actors.model.attention.probe import KVGeometry
from kv_transfer.device_kind import is_accelerator
from kv_transfer.layout import KeyOrder, KVCacheLayout, KVGroup
from kv_transfer.transports.shared_pool import allocate_shared_pool

logger = logging.getLogger(__name__)


def make_layout(
    geometry: KVGeometry,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    model_fingerprint: str,
    key_order: KeyOrder = KeyOrder.PLAIN,
) -> KVCacheLayout:
    """Return the layout of one rank's KV cache."""
    dtype_name = str(dtype).removeprefix("torch.")
    return KVCacheLayout(
        num_blocks=num_blocks,
        num_kv_heads=geometry.num_kv_heads,
        num_layers=geometry.num_layers,
        block_size=block_size,
        head_dim=geometry.head_dim,
        dtype=dtype_name,
        dtype_size_bytes=dtype.itemsize,
        model_fingerprint=model_fingerprint,
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        num_replicas=geometry.num_replicas,
        key_order=key_order,
        further_groups=tuple(
            KVGroup(
                group.num_planes,
                group.num_kv_heads,
                group.key_size,
                group.value_size,
                dtype_name,
                num_replicas=group.num_replicas,
            )
            for group in geometry.further_groups
        )
        + _state_groups(geometry),
        value_size=geometry.value_size,
    )


def _state_groups(geometry: KVGeometry) -> tuple[KVGroup, ...]:
    """Return the groups of recurrent layers, one for each dtype: they have no bytes in the blocks of tokens."""
    parts = [] if geometry.state is None else geometry.state.parts
    return tuple(
        KVGroup(
            num_layers=len({part.layer for part in parts if part.dtype is dtype}),
            num_kv_heads=1,
            key_size=1,
            value_size=0,
            dtype=str(dtype).removeprefix("torch."),
            bytes_per_request=sum(part.size_bytes for part in parts if part.dtype is dtype),
        )
        for dtype in dict.fromkeys(part.dtype for part in parts)
    )


def allocate_kv_cache(layout: KVCacheLayout, device: torch.device) -> Tensor:
    """Allocate a KV cache of zeros, of the layout's shape.

    It must not hold leftover bytes: masked keys have weight 0, but 0 times a NaN is a NaN. On the CPU the cache is in a
    memory file if the machine allows it, so that engines of the same host read blocks directly.
    """
    if not is_accelerator(device):
        try:
            return allocate_shared_pool(layout)
        except OSError as error:
            logger.warning(
                "the KV cache cannot be shared; transfers within the host go over TCP", extra={"reason": str(error)}
            )
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.zeros(layout.shape, dtype=dtype, device=device)


def copy_blocks(kv_cache: Tensor, copies: Iterable[BlockCopy]) -> None:
    """Copy whole blocks, for all layers and heads of this rank, after all work that was queued on the device before.

    kv_cache: [num_blocks, ...]
    copies: of existing blocks, none of which is both a source and a destination
    """
    for copy in copies:
        kv_cache[copy.destination].copy_(kv_cache[copy.source])
