"""Computes attention of decoding sequences that begin with the same blocks, which are read once for all of them.

The shared prefix is gathered once, and its scores are one matrix-matrix product for all sequences instead of one
vector-matrix product for each. One softmax covers the scores of the prefix and of the rest, so nothing is approximated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.sinks import softmax_with_sinks
from kv_transfer.device_kind import is_accelerator

_MIN_SEQUENCES = 4
_MIN_TOKENS = 2048
"""The fewest shared tokens, multiplied by the number of sequences, for which reading the prefix once is faster.

benchmarks/cascade.py measures the threshold.
"""


def count_shared_blocks(shape: BatchShape, num_decoding: int, block_size: int, device: torch.device) -> int:
    """Return how many leading blocks to read once for all decoding sequences.

    Returns 0 where reading them once is not faster, and on a GPU, where it was not measured.
    """
    num_blocks = shape.num_common_blocks
    is_measured = not is_accelerator(device)
    pays = num_decoding >= _MIN_SEQUENCES and num_decoding * num_blocks * block_size >= _MIN_TOKENS
    return num_blocks if is_measured and pays else 0


def attend_with_shared_prefix(
    layer: AttentionLayer,
    queries: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    mask: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with one token of each sequence to the shared prefix, and to the sequence's own keys after the prefix.

    queries: [n, num_kv_heads, num_heads / num_kv_heads, key_size]
    prefix:  keys and values, [1, num_kv_heads, num_prefix_tokens, key_size or value_size]
    own:     keys and values, [n, num_kv_heads, num_keys, key_size or value_size]
    mask:    [n, 1, 1, num_keys], additive, for the sequences' own keys
    sinks:   [num_kv_heads, num_heads / num_kv_heads, 1], the score of each head's sink; None: the layer has none
    Returns [n, num_kv_heads, num_heads / num_kv_heads, value_size] in queries' dtype; computes in float32.
    """
    num_sequences, num_kv_heads, group, key_size = queries.shape
    prefix_keys, prefix_values = (part[0].float() for part in prefix)
    keys, values = (part.float() for part in own)
    num_prefix_tokens = prefix_keys.shape[1]
    folded = queries.float().transpose(0, 1).reshape(num_kv_heads, num_sequences * group, key_size)
    common = torch.matmul(folded, prefix_keys.transpose(-1, -2))
    common = common.view(num_kv_heads, num_sequences, group, num_prefix_tokens).transpose(0, 1)
    scores = torch.cat([common, torch.matmul(queries.float(), keys.transpose(-1, -2))], dim=-1) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores[..., num_prefix_tokens:] += mask
    weights = softmax_with_sinks(scores, sinks)
    folded = weights[..., :num_prefix_tokens].transpose(0, 1).reshape(num_kv_heads, -1, num_prefix_tokens)
    attended = torch.matmul(folded, prefix_values).view(num_kv_heads, num_sequences, group, -1).transpose(0, 1)
    return (attended + torch.matmul(weights[..., num_prefix_tokens:], values)).to(queries.dtype)
