"""The self-check of a backend: small batches of requests against attention written out in float32.

One batch mixes all kinds of requests. Another has one token after a long context alone, whose keys a backend may split
over programs or threads that otherwise would have nothing to do.

The check uses the model's heads, head size, dtype, and each combination of soft-cap, window, direction and sinks that
its layers ask for, in blocks out of order. checks/self_check.py compares the whole model, with the torch backend, with
transformers' own forward; so a backend that passes here gives the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.backend import AttentionBackendKind, AttentionNeeds
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.cache.kv_cache import make_layout

# Relative to the largest number of a result. Attention in 16 bits rounds queries, weights and results once each.
_MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the check: tokens in the cache before the checked step, and tokens that the step computes."""

    num_computed: int
    num_new: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests of one step.

    longest_window: longer windows and chunks are checked with this many tokens, since the length is only a parameter
    is_causal: whether the batch is for layers whose tokens attend to those before them, or to the whole prompt
    """

    requests: tuple[_Request, ...]
    longest_window: int
    is_causal: bool = True


_MIXED = (_Request(0, 37), _Request(70, 1), _Request(33, 5), _Request(0, 1), _Request(15, 1), _Request(64, 40))
_BATCHES = (
    _Batch(_MIXED, 24),
    # Triton's kernels split contexts of more than 256 keys, if the batch is small (triton_kernels/launches.py).
    _Batch((_Request(700, 1),), 600),
    # A prompt whose tokens attend to all of it is computed in one step.
    _Batch((_Request(0, 37), _Request(0, 1), _Request(0, 70)), 24, is_causal=False),
)


@torch.inference_mode()
def find_fault(kind: AttentionBackendKind, needs: AttentionNeeds) -> str | None:
    """Return how far the backend is from the right result, in words, or None if it is right.

    needs: without an obstacle for this kind
    """
    try:
        error = max(
            _error(kind, checked, layer, batch.requests)
            for batch in _BATCHES
            for checked in _needs_of_groups(needs, batch.longest_window)
            for layer in checked.geometry.layers
            if layer.is_causal == batch.is_causal
        )
    except RuntimeError as failed:
        # An operator of another package refuses its arguments in this way, whatever the reason.
        return f"its self-check failed: {str(failed).splitlines()[0]}"
    limit = _MAX_ERROR[needs.dtype]
    if not error <= limit:  # This comparison is false for a NaN, so a NaN fails the check.
        return f"its self-check found an error of {error:.2g} (at most {limit:.2g})"
    return None


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer, sinks: Tensor | None = None
) -> Tensor:
    """Attend with the last q tokens of one sequence to all of it, written out in float32.

    query: [num_heads, q, key_size]; key: [num_kv_heads, k, key_size]; value: [num_kv_heads, k, value_size]
    sinks: [num_heads], the score of each head's sink; None: the layer has none
    Returns [q, num_heads, value_size].
    """
    group = query.shape[0] // key.shape[0]
    keys, values = (part.float().repeat_interleave(group, 0) for part in (key, value))
    scores = query.float() @ keys.transpose(1, 2) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    positions = torch.arange(key.shape[1], device=query.device)
    own = positions[-query.shape[1] :, None]
    hidden = positions > own if layer.is_causal else torch.zeros_like(positions > own)
    if layer.sliding_window is not None:
        hidden = hidden | (positions <= own - layer.sliding_window)
    if layer.chunk_size is not None:
        hidden = hidden | (positions // layer.chunk_size != own // layer.chunk_size)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        # A sink is a key of its own score and of a value of zeros.
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, query.shape[1], 1)], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def _needs_of_groups(needs: AttentionNeeds, longest_window: int) -> Iterator[AttentionNeeds]:
    """Yield the needs of each group of layers, as if the model had no others. longest_window: see _Batch"""
    geometry, planes = needs.geometry, needs.geometry.layer_planes
    for index, group in enumerate(geometry.groups):
        layers = [layer for layer in geometry.layers if planes[layer.index].group == index]
        alone = KVGeometry(
            group.num_heads,
            group.num_kv_heads,
            group.key_size,
            _distinct_layers(layers, longest_window),
            value_size=None if group.value_size == group.key_size else group.value_size,
        )
        yield replace(needs, geometry=alone)


def _distinct_layers(layers: Sequence[AttentionLayer], longest_window: int) -> tuple[AttentionLayer, ...]:
    """One layer of each kind, and at least two, so that a mistake in the layers' distances shows."""
    kinds = {
        replace(
            layer,
            index=0,
            sliding_window=layer.sliding_window and min(layer.sliding_window, longest_window),
            chunk_size=layer.chunk_size and min(layer.chunk_size, longest_window),
        )
        for layer in layers
    }
    ordered = sorted(kinds, key=repr)
    return tuple(replace(layer, index=index) for index, layer in enumerate(ordered * (1 if len(ordered) > 1 else 2)))


def _error(
    kind: AttentionBackendKind, needs: AttentionNeeds, layer: AttentionLayer, requests: Sequence[_Request]
) -> float:
    """The largest difference from the right result, relative to the right result's largest number."""
    geometry, generator = needs.geometry, torch.Generator().manual_seed(layer.index)
    tables = _block_tables(requests, needs.block_size)
    layout = make_layout(
        geometry,
        num_blocks=int(tables.max()) + 1,
        block_size=needs.block_size,
        dtype=needs.dtype,
        model_fingerprint="",
    )
    backend = kind.open(torch.zeros(layout.shape, dtype=needs.dtype, device=needs.device), needs)

    def draw(num_heads: int, num_tokens: int, size: int) -> Tensor:
        drawn = torch.randn(num_heads, num_tokens, size, generator=generator)
        return drawn.to(needs.device, needs.dtype)

    lengths = [request.num_computed + request.num_new for request in requests]
    keys, values = (
        [draw(geometry.num_kv_heads, length, size) for length in lengths]
        for size in (geometry.groups[0].key_size, geometry.groups[0].value_size)
    )
    queries = [draw(geometry.num_heads, length, geometry.head_dim) for length in lengths]
    sinks = draw(1, geometry.num_heads, 1)[0, :, 0].contiguous() if layer.has_sinks else None
    for index, request in enumerate(requests):
        if request.num_computed:
            before = slice(0, request.num_computed)
            first = BatchShape(np.array([0, request.num_computed]), np.array([0]), tables[index : index + 1])
            backend.prepare(first).attend(
                layer, queries[index][:, before], keys[index][:, before], values[index][:, before], sinks
            )
    starts = np.cumsum([0, *(request.num_new for request in requests)])
    batch = BatchShape(starts, np.array([request.num_computed for request in requests]), tables)
    query, key, value = (
        torch.cat([part[:, request.num_computed :] for part, request in zip(parts, requests, strict=True)], dim=1)
        for parts in (queries, keys, values)
    )
    output = backend.prepare(batch).attend(layer, query, key, value, sinks).float()
    expected = torch.cat(
        [
            attend_densely(one[:, request.num_computed :], one_key, one_value, layer, sinks)
            for one, one_key, one_value, request in zip(queries, keys, values, requests, strict=True)
        ]
    )
    return float((output - expected).abs().max() / expected.abs().max())


def _block_tables(requests: Sequence[_Request], block_size: int) -> np.ndarray:
    """[num_requests, max_blocks] int64: every block once, the last ones first, and 0 for those that do not exist."""
    counts = [-(-(request.num_computed + request.num_new) // block_size) for request in requests]
    tables = np.zeros((len(requests), max(counts)), dtype=np.int64)
    next_block = sum(counts)
    for index, count in enumerate(counts):
        tables[index, :count] = np.arange(next_block, next_block - count, -1)
        next_block -= count
    return tables
