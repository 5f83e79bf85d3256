"""Attention of a decode batch that begins with the same blocks: their keys are read once for all of it.

What is common is one product of matrices instead of one of a vector with a matrix for each sequence, and is gathered
once. The scores of both parts stand in one row before the softmax, so nothing is approximated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.attention.batch_attention import AttentionLayer, BatchShape

_MIN_SEQUENCES = 4
_MIN_TOKENS = 2048
"""Read once instead of so often. Below, the additional operations cost more: benchmarks/cascade.py."""


def count_shared_blocks(shape: BatchShape, num_decoding: int, block_size: int, device: torch.device) -> int:
    """How many blocks from the start to read once for all sequences that decode; 0 where it does not pay."""
    num_blocks = shape.num_common_blocks
    is_measured = device.type == "cpu"
    pays = num_decoding >= _MIN_SEQUENCES and num_decoding * num_blocks * block_size >= _MIN_TOKENS
    return num_blocks if is_measured and pays else 0


def attend_with_shared_prefix(
    layer: AttentionLayer,
    queries: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """One token of each sequence against what all begin with, and what each has after that.

    queries: [n, num_kv_heads, num_heads / num_kv_heads, head_dim]
    prefix:  keys and values, [1, num_kv_heads, num_prefix_tokens, head_dim]
    own:     keys and values, [n, num_kv_heads, num_keys, head_dim]
    mask:    [n, 1, 1, num_keys] additive, of the own ones
    Returns queries' shape and dtype; computes in float32.
    """
    num_sequences, num_kv_heads, group, head_dim = queries.shape
    prefix_keys, prefix_values = (part[0].float() for part in prefix)
    keys, values = (part.float() for part in own)
    num_prefix_tokens = prefix_keys.shape[1]
    folded = queries.float().transpose(0, 1).reshape(num_kv_heads, num_sequences * group, head_dim)
    common = torch.matmul(folded, prefix_keys.transpose(-1, -2))
    common = common.view(num_kv_heads, num_sequences, group, num_prefix_tokens).transpose(0, 1)
    scores = torch.cat([common, torch.matmul(queries.float(), keys.transpose(-1, -2))], dim=-1) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores[..., num_prefix_tokens:] += mask
    weights = functional.softmax(scores, dim=-1)
    folded = weights[..., :num_prefix_tokens].transpose(0, 1).reshape(num_kv_heads, -1, num_prefix_tokens)
    attended = torch.matmul(folded, prefix_values).view(num_kv_heads, num_sequences, group, head_dim).transpose(0, 1)
    return (attended + torch.matmul(weights[..., num_prefix_tokens:], values)).to(queries.dtype)
