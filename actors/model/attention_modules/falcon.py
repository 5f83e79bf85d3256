"""Falcon's attention over the paged KV cache. transformers' module computes it without an attention function.

One linear layer gives queries, keys and values. Its outputs are, for each KV head: the query heads that share the KV
head, the key, the value. transformers repeats keys and values for every query head before it caches them (Falcon 40B);
here each KV head is cached once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from actors.model.attention.batch_attention import BATCH_ARGUMENT, BatchAttention, attention_forward


def attend_as_falcon(
    module: Any,  # transformers' FalconAttention, whose attributes are untyped
    batch: BatchAttention,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **ignored: object,
) -> tuple[Tensor, None]:
    """Compute what FalconAttention.forward computes with rotary positions.

    hidden_states: [1, num_tokens, hidden_size]
    position_embeddings: cosines and sines, [1, num_tokens, head_dim] each
    Returns [1, num_tokens, hidden_size], and None in place of the attention weights.
    """
    num_heads, head_dim = module.num_heads, module.head_dim
    num_kv_heads = num_heads
    if module.new_decoder_architecture:
        num_kv_heads = module.num_kv_heads
    elif module.multi_query:
        num_kv_heads = 1
    fused = module.query_key_value(hidden_states)
    by_kv_head = fused.view(1, fused.shape[1], num_kv_heads, num_heads // num_kv_heads + 2, head_dim)
    query = by_kv_head[..., :-2, :].flatten(2, 3)
    key, value = by_kv_head[..., -2, :], by_kv_head[..., -1, :]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]  # left untyped
    arguments: dict[str, Any] = {BATCH_ARGUMENT: batch}
    attended, _ = attention_forward(module, query, key, value, None, scaling=module.inv_norm_factor, **arguments)
    return module.dense(attended.flatten(2)), None
