"""Estimates what ranks exchange in each layer, which tables of operators do not have.

Tensor-parallel ranks sum their parts of the hidden states after attention and after the MLP: a ring moves 2 (n-1)/n of
them through each rank's link. Data-parallel engines with common experts gather the tokens of all ranks before the
experts and scatter the sums afterwards, each of which moves (n-1)/n (vLLM's all2all backend allgather_reducescatter).

The size of the hidden states follows from the tables: with one token, the projection to queries, keys and values takes
longer than the projection back by the time of reading the weights of keys and values, at the bandwidth that attention
reaches with long contexts. For Llama-3.1-8B on two GPUs, on one and on two ranks, this gives 3500 to 4300; it is 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.simulation.timing.model_shape import ModelShape
from cluster.simulation.timing.op_files import OpPoints

COLLECTIVE_S: Final = 1.5e-5
"""Seconds of a collective operation before its first byte: NCCL on PCIe and NVLink needs 10 to 20 us."""
LINK_PART: Final = 0.8
"""The part of a link's bandwidth that collectives reach with large messages."""
_BYTES: Final = 2.0
_MAX_MEMORY_BOUND_TOKENS: Final = 16
_MIN_CONTEXT_TOKENS: Final = 100_000
"""Attention over so many tokens of context waits for memory only."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How many ranks work together on one model.

    data_parallel_size:   engines, each with its own requests and scheduler
    tensor_parallel_size: ranks of each engine
    is_expert_parallel:   whether ranks have different experts, and not a part of each
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    is_expert_parallel: bool = False


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Estimates the seconds that a step's exchanges take.

    has_experts:      whether the engines have common experts
    link_bytes_per_s: of a rank's link to the others, in one direction
    """

    layout: RankLayout
    num_layers: int
    hidden_size: float
    has_experts: bool
    link_bytes_per_s: float

    def seconds(self, num_own_tokens: float, num_all_tokens: float) -> float:
        """Return the seconds of a step. num_own_tokens: of one engine; num_all_tokens: of all engines together"""
        layout, token_s = self.layout, _BYTES * self.hidden_size / (self.link_bytes_per_s * LINK_PART)
        is_gathered = self.has_experts and layout.data_parallel_size > 1
        layer_s = 0.0
        if layout.tensor_parallel_size > 1:
            part = (layout.tensor_parallel_size - 1) / layout.tensor_parallel_size
            # The sums after the experts are scattered, where there are gathered tokens.
            num_sums = 1 if is_gathered else 2
            layer_s += num_sums * (COLLECTIVE_S + 2 * part * num_own_tokens * token_s)
        if is_gathered:
            num_ranks = layout.data_parallel_size * layout.tensor_parallel_size
            layer_s += 2 * (COLLECTIVE_S + (num_ranks - 1) / num_ranks * num_all_tokens * token_s)
        return self.num_layers * layer_s


def estimate_hidden_size(
    qkv_proj: OpPoints, o_proj: OpPoints, attention: OpPoints, shape: ModelShape, tensor_parallel_size: int
) -> float | None:
    """Return about how large a token's hidden state is, in numbers; None if the tables have too few points.

    attention: points with the keys of ATTENTION_KEYS
    """
    num_context = attention.keys[:, 2] * attention.keys[:, 3]
    is_bound = (attention.keys[:, 0] == 0) & (num_context >= _MIN_CONTEXT_TOKENS) & (attention.times_us > 0)
    tokens = qkv_proj.keys[qkv_proj.keys[:, 0] <= _MAX_MEMORY_BOUND_TOKENS, 0]
    if not is_bound.any() or not len(tokens):
        return None
    kv_bytes = 2 * _BYTES * shape.num_kv_heads * shape.head_dim / tensor_parallel_size
    bytes_per_us = float(np.median(num_context[is_bound] * kv_bytes / attention.times_us[is_bound]))
    qkv_us = np.interp(tokens, qkv_proj.keys[:, 0], qkv_proj.times_us)
    o_us = np.interp(tokens, o_proj.keys[:, 0], o_proj.times_us)
    found = float(np.mean(qkv_us - o_us)) * bytes_per_us / kv_bytes
    return found if found > 0 else None
