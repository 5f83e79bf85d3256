"""The paged backend against attention written out, over random batches.

Tests of actors/model/attention/batch_attention.py, actors/model/attention/batch_plan.py,
actors/model/attention/sinks.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.model.attention.backend_check import attend_densely
from actors.model.attention.batch_attention import AttentionLayer, BatchShape, Reach
from actors.model.attention.batch_plan import CacheShape, plan_reach
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.cache.group_memory import group_memories
from kv_transfer.layout import KeyOrder

NUM_KV_HEADS, NUM_LAYERS, HEAD_DIM = 2, 2, 4
REACHES = (Reach(), Reach(3), Reach(10), Reach(chunk_size=8))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int]:
    """((computed, to compute) per sequence, block_size, group, seed)."""
    computed = st.integers(0, 40)
    to_compute = st.one_of(st.just(1), st.integers(1, 20))
    sequences = draw(st.lists(st.tuples(computed, to_compute), min_size=1, max_size=6))
    return sequences, draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 3])), draw(st.integers(0, 99))


@given(batches(), st.sampled_from(REACHES), st.sampled_from([None, 1.5]), st.sampled_from(KeyOrder), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_batch_attends_as_written_out(
    batch: tuple[list[tuple[int, int]], int, int, int],
    reach: Reach,
    softcap: float | None,
    key_order: KeyOrder,
    has_sinks: bool,
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
    layer = AttentionLayer(1, 0.4, softcap, reach.sliding_window, has_sinks=has_sinks, chunk_size=reach.chunk_size)
    geometry = KVGeometry(NUM_KV_HEADS * group, NUM_KV_HEADS, HEAD_DIM, (replace(layer, index=0), layer))
    backend = TorchAttention(cache, geometry, block_size, key_order=key_order)
    sinks = torch.randn(NUM_KV_HEADS * group, generator=generator) if has_sinks else None
    states = [torch.randn(2, NUM_KV_HEADS, sum(lengths), HEAD_DIM, generator=generator) for lengths in sequences]
    first_block = 0
    for index, (computed, _) in enumerate(sequences):
        tables[index, : blocks_each[index]] = order[first_block : first_block + blocks_each[index]]
        first_block += blocks_each[index]
        if computed:
            before = BatchShape(np.array([0, computed]), np.array([0]), tables[index : index + 1])
            stored = states[index][:, :, :computed]
            backend.prepare(before).attend(layer, stored[0].repeat(group, 1, 1), stored[0], stored[1], sinks)
    lengths = np.array(sequences)
    shape = BatchShape(np.concatenate([[0], np.cumsum(lengths[:, 1])]), lengths[:, 0], tables)
    fresh = torch.cat([state[:, :, computed:] for state, (computed, _) in zip(states, sequences, strict=True)], dim=2)
    query = torch.randn(NUM_KV_HEADS * group, fresh.shape[2], HEAD_DIM, generator=generator)

    output = backend.prepare(shape).attend(layer, query, fresh[0], fresh[1], sinks)

    queries = torch.split(query, lengths[:, 1].tolist(), dim=1)
    expected = torch.cat(
        [attend_densely(part, state[0], state[1], layer, sinks) for part, state in zip(queries, states, strict=True)]
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_the_transposed_order_has_one_number_of_every_token_after_the_other() -> None:
    plain = torch.zeros(1, NUM_KV_HEADS, NUM_LAYERS, 2, 16, HEAD_DIM)
    transposed = torch.zeros_like(plain)
    shape = BatchShape(np.array([0, 5]), np.array([0]), np.zeros((1, 1), dtype=np.int64))
    key, value = torch.randn(2, NUM_KV_HEADS, 5, HEAD_DIM)
    for cache, key_order in ((plain, KeyOrder.PLAIN), (transposed, KeyOrder.TRANSPOSED)):
        layers = tuple(AttentionLayer(index, 0.4, None, None) for index in range(NUM_LAYERS))
        geometry = KVGeometry(NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM, layers)
        backend = TorchAttention(cache, geometry, 16, key_order=key_order)
        backend.prepare(shape).attend(layers[1], key, key, value)

    assert torch.equal(plain[0, :, 1, 0, :5], key)
    tiles = transposed[:, :, :, 0].reshape(-1, HEAD_DIM, 16)
    assert torch.equal(tiles.transpose(1, 2).reshape(plain[:, :, :, 0].shape), plain[:, :, :, 0])
    assert torch.equal(transposed[:, :, :, 1], plain[:, :, :, 1])


def one_head() -> CacheShape:
    """The cache of a model of one layer and one head."""
    geometry = KVGeometry(1, 1, 4, (AttentionLayer(0, 0.4, None, None),))
    return CacheShape(group_memories(geometry, 16)[0], torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("query_lens", "is_causal", "widths", "num_segments"),
    [
        ([1, 3, 1, 4, 17], True, {1: 2, 4: 2}, 1),
        ([5, 6, 7, 16], True, {8: 3, 16: 1}, 0),
        ([1, 3, 4], False, {1: 1}, 2),
    ],
)
def test_short_sequences_are_computed_together_unless_they_see_all_of_a_prompt(
    query_lens: list[int], is_causal: bool, widths: dict[int, int], num_segments: int
) -> None:
    cache = one_head()
    count = len(query_lens)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    shape = BatchShape(starts, np.full(count, 0 if not is_causal else 30), np.zeros((count, 9), dtype=np.int64))
    plan = plan_reach(shape, cache, Reach(), is_causal=is_causal)
    assert {bucket.tokens.shape[1]: bucket.tokens.shape[0] for bucket in plan.decodes} == widths
    assert len(plan.prefills) == num_segments


def decode_plan(seq_lens: list[int], sliding_window: int | None) -> list[int]:
    """Gathered blocks per sequence of each bucket that decoding such sequences makes."""
    cache = one_head()
    count = len(seq_lens)
    shape = BatchShape(np.arange(count + 1), np.array(seq_lens) - 1, np.zeros((count, 200), dtype=np.int64))
    buckets = plan_reach(shape, cache, Reach(sliding_window), is_causal=True).decodes
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
