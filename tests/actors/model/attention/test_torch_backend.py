"""The paged backend against attention written out, over random batches.

Tests of actors/model/attention/batch_attention.py, actors/model/attention/batch_plan.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.batch_plan import CacheShape, plan_window
from actors.model.attention.torch_backend import TorchAttention

NUM_KV_HEADS, NUM_LAYERS, HEAD_DIM = 2, 2, 4
WINDOWS = (None, 3, 10)


def attend_densely(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
    """[heads, q, dim] of the last q positions against [kv_heads, k, dim]; returns [q, heads, dim]."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    keys = torch.arange(key.shape[1])
    queries = keys[-query.shape[1] :, None]
    hidden = keys > queries
    if layer.sliding_window is not None:
        hidden |= keys <= queries - layer.sliding_window
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(0, 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int]:
    """((computed, to compute) per sequence, block_size, group, seed)."""
    computed = st.integers(0, 40)
    to_compute = st.one_of(st.just(1), st.integers(1, 20))
    sequences = draw(st.lists(st.tuples(computed, to_compute), min_size=1, max_size=6))
    return sequences, draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 3])), draw(st.integers(0, 99))


@given(batches(), st.sampled_from(WINDOWS), st.sampled_from([None, 1.5]))
@settings(max_examples=60, deadline=None)
def test_every_batch_attends_as_written_out(
    batch: tuple[list[tuple[int, int]], int, int, int], window: int | None, softcap: float | None
) -> None:
    sequences, block_size, group, seed = batch
    generator = torch.Generator().manual_seed(seed)
    blocks_each = [-(-(computed + count) // block_size) for computed, count in sequences]
    order = torch.randperm(sum(blocks_each) + 1, generator=generator).numpy()
    # Whatever the batch does not own is NaN: reading it would show.
    cache = torch.full(
        (len(order), NUM_KV_HEADS, NUM_LAYERS, 2, block_size, HEAD_DIM), float("nan"), dtype=torch.float32
    )
    tables = np.zeros((len(sequences), max(blocks_each)), dtype=np.int64)
    backend = TorchAttention(cache, frozenset({window}))
    layer = AttentionLayer(index=1, scaling=0.4, softcap=softcap, sliding_window=window)
    states = [torch.randn(2, NUM_KV_HEADS, sum(lengths), HEAD_DIM, generator=generator) for lengths in sequences]
    first_block = 0
    for index, (computed, _) in enumerate(sequences):
        tables[index, : blocks_each[index]] = order[first_block : first_block + blocks_each[index]]
        first_block += blocks_each[index]
        if computed:
            before = BatchShape(np.array([0, computed]), np.array([0]), tables[index : index + 1])
            stored = states[index][:, :, :computed]
            backend.prepare(before).attend(layer, stored[0].repeat(group, 1, 1), stored[0], stored[1])
    lengths = np.array(sequences)
    shape = BatchShape(np.concatenate([[0], np.cumsum(lengths[:, 1])]), lengths[:, 0], tables)
    fresh = torch.cat([state[:, :, computed:] for state, (computed, _) in zip(states, sequences, strict=True)], dim=2)
    query = torch.randn(NUM_KV_HEADS * group, fresh.shape[2], HEAD_DIM, generator=generator)

    output = backend.prepare(shape).attend(layer, query, fresh[0], fresh[1])

    queries = torch.split(query, lengths[:, 1].tolist(), dim=1)
    expected = torch.cat(
        [attend_densely(part, state[0], state[1], layer) for part, state in zip(queries, states, strict=True)]
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def decode_plan(seq_lens: list[int], sliding_window: int | None) -> list[int]:
    """Gathered blocks per sequence of each bucket that decoding such sequences makes."""
    cache = CacheShape(1, 1, 16, torch.float32, torch.device("cpu"))
    count = len(seq_lens)
    shape = BatchShape(np.arange(count + 1), np.array(seq_lens) - 1, np.zeros((count, 200), dtype=np.int64))
    buckets = plan_window(shape, cache, sliding_window).decodes
    assert sum(len(bucket.tokens) for bucket in buckets) == count
    return [bucket.mask.shape[-1] // 16 for bucket in buckets]


@pytest.mark.parametrize(
    ("seq_lens", "sliding_window", "num_blocks"),
    [
        ([100, 90, 1, 128], None, [8]),
        ([3000, 100, 2900, 90], None, [7, 188]),
        ([3000, 100, 2900, 90], 32, [3]),
        ([3000, 16], 1, [1]),
    ],
)
def test_decodes_of_similar_length_share_a_gather_and_windows_bound_it(
    seq_lens: list[int], sliding_window: int | None, num_blocks: list[int]
) -> None:
    assert decode_plan(seq_lens, sliding_window) == num_blocks
