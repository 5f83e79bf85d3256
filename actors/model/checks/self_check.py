"""Checks at start that the engine computes what transformers computes, with the paged KV cache and flattened batches.

Reading config.json finds only the unsupported features that somebody thought of. So every loaded model first computes
the output (logits, or the hidden states of a model without a language head) of two random sequences in two ways:
- with transformers' eager attention, the model's own masks, and its own forward of experts;
- through our attention, in three steps: a prefill; a chunk after a cached prefix, beside the prefill of the other
  sequence; and decoding. A model that is not causal computes both sequences in one step.
If the two outputs differ, the engine refuses the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.cache.kv_cache import allocate_kv_cache, make_layout
from actors.model.config.support import attention_choice
from actors.model.dequantizing import is_quantized
from actors.model.errors import SelfCheckFailed
from actors.model.forward import FlatForward
from actors.model.linears.grouped_experts import looping_experts
from actors.model.states.step_states import with_states
from kv_transfer.device_kind import is_accelerator

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 4
_MIN_TOKENS = 24
_TOKENS_PAST_WINDOW = 8
# About one second of matrix products, so that a check stays short beside the reading of the weights.
_MAX_FLOPS_CPU, _MAX_FLOPS_GPU = 2e11, 1e14
# The largest relative_error() that passes. In float32 it is the worst token's error. In 16 bits it is the median
# token's: a deep model's rounding errors are some per cent, and a mixture of experts may choose other experts for one.
_MAX_ERROR_FLOAT32 = 1e-3
_MAX_ERROR_16_BITS = 0.15


@torch.inference_mode()
def check_forward(forward: FlatForward, geometry: KVGeometry, *, vocab_size: int, max_tokens: int) -> None:
    """Raise SelfCheckFailed unless the model's logits through the paged KV cache equal transformers' own.

    The sequences are longer than the longest sliding window and the longest chunk of attention, if computing them takes
    no more than about a second.
    max_tokens: the longest sequence that the model can compute
    """
    started = time.monotonic()
    num_tokens = _choose_num_tokens(forward, geometry, max_tokens)
    sequences = draw_sequences(forward, vocab_size, num_tokens)
    paged = _paged_logits(forward, geometry, sequences)
    stock = _stock_logits(forward, sequences)
    is_rounded = is_quantized(forward.model)
    error = relative_error(paged, stock, is_rounded=is_rounded)
    limit = error_limit(forward.model.dtype, is_rounded=is_rounded)
    if not error <= limit:  # This comparison is false for a NaN, so a NaN fails the check.
        raise SelfCheckFailed(
            type(forward.model).__name__,
            f"its logits through the paged cache differ from its own by {error:.2g} (at most {limit:.2g})",
        )
    logger.info(
        "checked the model's forward against transformers' own",
        extra={"relative_error": error, "num_tokens": num_tokens, "elapsed_s": round(time.monotonic() - started, 3)},
    )


def draw_sequences(forward: FlatForward, vocab_size: int, num_tokens: int) -> Tensor:
    """Draw two sequences of tokens, [2, num_tokens] int64, on the model's device. Every engine draws the same ones."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(vocab_size, (2, num_tokens), generator=generator).to(forward.model.device)
    if forward.padding_idx is not None:
        # A model with a padding token gives this token no position of its own.
        sequences.masked_fill_(sequences == forward.padding_idx, forward.padding_idx + 1)
    return sequences


def error_limit(dtype: torch.dtype, *, is_rounded: bool = False) -> float:
    """Return the largest result of relative_error() that passes in this dtype, or in a model that rounds to 8 bits.

    dtype: of the model's weights; its logits may have another (Mamba 2 and Nemotron-H return float32 from bfloat16)
    """
    return _MAX_ERROR_16_BITS if dtype.itemsize < 4 or is_rounded else _MAX_ERROR_FLOAT32


def _choose_num_tokens(forward: FlatForward, geometry: KVGeometry, max_tokens: int) -> int:
    reaches = [(layer.sliding_window, layer.chunk_size) for layer in geometry.layers]
    windows = [window for reach in reaches for window in reach if window is not None]
    wanted = max([_MIN_TOKENS] + [window + _TOKENS_PAST_WINDOW for window in windows])
    num_parameters = forward.model.num_parameters()
    max_flops = _MAX_FLOPS_GPU if is_accelerator(forward.model.device) else _MAX_FLOPS_CPU
    affordable = int(max_flops / (2 * 3 * num_parameters))
    return min(wanted, max(affordable, _MIN_TOKENS), max_tokens)


def _paged_logits(forward: FlatForward, geometry: KVGeometry, sequences: Tensor) -> Tensor:
    """Compute logits through the paged cache, [2 * num_tokens - num_tokens // 2, vocab_size].

    They are those of the whole first sequence, then of the first half of the second one.
    """
    num_tokens = sequences.shape[1]
    half = num_tokens - num_tokens // 2
    blocks_per_sequence = -(-num_tokens // _BLOCK_SIZE)
    layout = make_layout(
        geometry,
        num_blocks=2 * blocks_per_sequence,
        block_size=_BLOCK_SIZE,
        dtype=forward.model.dtype,
        model_fingerprint="",
    )
    num_token_blocks, num_state_blocks = layout.num_blocks, layout.num_state_blocks
    layout = replace(layout, num_blocks=num_token_blocks + 2 * num_state_blocks)
    kv_cache = allocate_kv_cache(layout, sequences.device)
    backend = with_states(TorchAttention(kv_cache, geometry, _BLOCK_SIZE), geometry)
    # The blocks are out of order, so that a wrong address gives a wrong result.
    block_tables = np.arange(2 * blocks_per_sequence)[::-1].reshape(blocks_per_sequence, 2).T
    slots = num_token_blocks + np.arange(2 * num_state_blocks)[::-1].reshape(num_state_blocks, 2).T
    steps = [
        ([0, num_tokens * 2 // 3], [0, 0]),
        ([num_tokens * 2 // 3, num_tokens - 1], [0, half - 1]),
        ([num_tokens - 1, num_tokens], [half - 1, half]),
    ]
    if not geometry.is_causal:
        steps = [([0, num_tokens], [0, half])]
    logits: list[list[Tensor]] = [[], []]
    for edges in steps:
        for sequence, part in _run_step(forward, backend, sequences, (block_tables, slots), edges):
            logits[sequence].append(part)
    return torch.cat(logits[0] + logits[1])


def _run_step(
    forward: FlatForward,
    backend: AttentionBackend,
    sequences: Tensor,
    tables: tuple[np.ndarray, np.ndarray],
    edges: tuple[list[int], list[int]],
) -> list[tuple[int, Tensor]]:
    """Compute a part of each sequence in one batch.

    tables: each sequence's blocks of tokens, and its blocks of recurrent state
    edges: (start, stop) of each sequence's part
    Returns the index of each sequence whose part is not empty, with the logits of the part's tokens.
    """
    present = [sequence for sequence, (start, stop) in enumerate(edges) if stop > start]
    lengths = [edges[sequence][1] - edges[sequence][0] for sequence in present]
    shape = BatchShape(
        query_starts=np.cumsum([0, *lengths]),
        num_computed=np.array([edges[sequence][0] for sequence in present]),
        block_tables=tables[0][present],
        state_blocks=tables[1][present],
    )
    input_ids = torch.cat([sequences[sequence, slice(*edges[sequence])] for sequence in present])
    positions = torch.cat([torch.arange(*edges[sequence]) for sequence in present]).to(sequences.device)
    everywhere = torch.arange(sum(lengths), device=sequences.device)
    logits = forward(input_ids, positions, backend.prepare(shape), everywhere)
    return list(zip(present, torch.split(logits, lengths), strict=True))


def _stock_logits(forward: FlatForward, sequences: Tensor) -> Tensor:
    """Compute the logits that _paged_logits returns, with the model's own eager attention and masks.

    The sequences are computed one after the other.
    """
    num_tokens = sequences.shape[1]
    with stock_attention(forward.model), looping_experts(forward.model):
        return torch.cat([forward.stock(sequences[0]), forward.stock(sequences[1, : num_tokens - num_tokens // 2])])


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model use transformers' eager attention until the context ends."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention_choice(model.config))


def relative_error(paged: Tensor, stock: Tensor, *, is_rounded: bool = False) -> float:
    """Return how far the paged outputs are from transformers' own; both are [num_tokens, n].

    A token's error is |paged - stock| / |stock - mean(stock)|, with Euclidean norms and the mean over n. The result is
    the largest error of a token; for dtypes of less than 32 bits, and for a model that rounds to 8 bits, it is the
    median.
    """
    difference = (paged.float() - stock.float()).norm(dim=-1)
    spread = (stock.float() - stock.float().mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors = difference / spread.clamp_min(torch.finfo(torch.float32).tiny)
    return float(errors.median() if paged.dtype.itemsize < 4 or is_rounded else errors.max())
