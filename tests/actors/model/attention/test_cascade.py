"""A prefix of all sequences is read once, and attended to as if it were read by each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.model.attention import cascade
from actors.model.attention.backend_check import attend_densely
from actors.model.attention.batch_attention import AttentionLayer, BatchShape, Reach
from actors.model.attention.batch_plan import CacheShape, plan_reach
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.cache.group_memory import group_memories

NUM_KV_HEADS, NUM_LAYERS, HEAD_DIM, BLOCK_SIZE = 2, 2, 4, 4
NUM_COMMON = 3
LENGTHS = (13, 16, 29, 90, 14)
"""The lengths of the sequences, this step's token included; they begin with NUM_COMMON blocks of the same."""


@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (1.5, False), (None, True)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_shared_prefix_changes_nothing(
    is_shared: bool, group: int, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "_MIN_TOKENS", 1 if is_shared else 10**6)
    generator = torch.Generator().manual_seed(7)
    num_own = [-(-length // BLOCK_SIZE) - NUM_COMMON for length in LENGTHS]
    # Whatever the batch does not own is NaN: reading it would show.
    cache = torch.full((NUM_COMMON + sum(num_own) + 1, NUM_KV_HEADS, NUM_LAYERS, 2, BLOCK_SIZE, HEAD_DIM), np.nan)
    layer = AttentionLayer(index=1, scaling=0.4, softcap=softcap, sliding_window=None, has_sinks=has_sinks)
    geometry = KVGeometry(NUM_KV_HEADS * group, NUM_KV_HEADS, HEAD_DIM, (replace(layer, index=0), layer))
    backend = TorchAttention(cache, geometry, BLOCK_SIZE)
    sinks = torch.randn(NUM_KV_HEADS * group, generator=generator) if has_sinks else None
    tables = np.zeros((len(LENGTHS), NUM_COMMON + max(num_own)), dtype=np.int64)
    prefix = torch.randn(2, NUM_KV_HEADS, NUM_COMMON * BLOCK_SIZE, HEAD_DIM, generator=generator)
    states, next_block = [], NUM_COMMON
    for index, length in enumerate(LENGTHS):
        tables[index, :NUM_COMMON] = np.arange(NUM_COMMON)
        tables[index, NUM_COMMON : NUM_COMMON + num_own[index]] = np.arange(next_block, next_block + num_own[index])
        next_block += num_own[index]
        own = torch.randn(2, NUM_KV_HEADS, length - prefix.shape[2], HEAD_DIM, generator=generator)
        states.append(torch.cat([prefix, own], dim=2))
        before = BatchShape(np.array([0, length - 1]), np.array([0]), tables[index : index + 1])
        stored = states[index][:, :, : length - 1]
        backend.prepare(before).attend(layer, stored[0].repeat(group, 1, 1), stored[0], stored[1], sinks)
    fresh = torch.cat([state[:, :, -1:] for state in states], dim=2)
    query = torch.randn(NUM_KV_HEADS * group, len(LENGTHS), HEAD_DIM, generator=generator)
    shape = BatchShape(np.arange(len(LENGTHS) + 1), np.array(LENGTHS) - 1, tables, NUM_COMMON)

    plan = backend.prepare(shape)
    output = plan.attend(layer, query, fresh[0], fresh[1], sinks)

    expected = torch.cat(
        [attend_densely(query[:, [i]], state[0], state[1], layer, sinks) for i, state in enumerate(states)]
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    buckets = plan._plans[0, Reach()].decodes
    assert all((bucket.prefix_tiles is not None) == is_shared for bucket in buckets)
    num_read = sum(bucket.mask.shape[-1] * len(bucket.tokens) for bucket in buckets)
    assert (num_read < sum(LENGTHS)) == is_shared


@pytest.mark.parametrize(
    ("num_decoding", "num_common", "window", "expected"),
    [(4, 32, None, 32), (4, 31, None, 0), (3, 100, None, 0), (32, 4, None, 4), (8, 0, None, 0), (8, 100, 64, 0)],
)
def test_it_is_done_where_it_pays(num_decoding: int, num_common: int, window: int | None, expected: int) -> None:
    geometry = KVGeometry(2, 2, 4, (AttentionLayer(0, 0.4, None, None),))
    cache = CacheShape(group_memories(geometry, 16)[0], torch.float32, torch.device("cpu"))
    seq_lens = np.full(num_decoding, 2000)
    shape = BatchShape(
        np.arange(num_decoding + 1), seq_lens - 1, np.zeros((num_decoding, 125), dtype=np.int64), num_common
    )
    for bucket in plan_reach(shape, cache, Reach(window), is_causal=True).decodes:
        num_shared = 0 if bucket.prefix_tiles is None else len(bucket.prefix_tiles) // cache.memory.num_kv_heads
        assert num_shared == expected
