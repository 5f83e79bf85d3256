"""The kernels in Triton's interpreter, against attention written out in float64.

test_kernels.py runs this file in a process of its own: the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.model.attention import backend_check
from actors.model.attention.backend import AttentionNeeds
from actors.model.attention.backend_check import find_fault
from actors.model.attention.batch_attention import AttentionLayer, BatchShape, Reach
from actors.model.attention.batch_plan import begun_blocks, token_slots
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.attention.triton_backend import TritonAttention, TritonKind
from actors.model.attention.triton_kernels import launches, operators
from actors.model.cache.kv_cache import make_layout
from actors.model.cache.kv_groups import LayerGroup, LayerPlane
from actors.model.graphs.decode_inputs import DecodeInputs, DecodeStep
from kv_transfer.layout import KeyOrder

NUM_KV_HEADS, NUM_LAYERS = 2, 2
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""The error allowed in a result of about 1. Attention in 16 bits rounds weights and results once each."""
MIXED = ((0, 23), (37, 1), (20, 5), (0, 1), (30, 40), (15, 1))
"""(tokens in the cache, tokens of the step) of each request; what is short and what is long depends on the group."""
DECODES = ((40, 1), (0, 1), (63, 1))
REACHES = (Reach(), Reach(3), Reach(10), Reach(chunk_size=8))


def attend_in_float64(
    query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer, sinks: Tensor | None = None
) -> Tensor:
    """The last q tokens of one sequence attend to all of it.

    query: [num_heads, q, head_dim]; key, value: [num_kv_heads, k, head_dim]; sinks: [num_heads]
    Returns [q, num_heads, head_dim].
    """
    group, num_keys, num_queries = query.shape[0] // key.shape[0], key.shape[1], query.shape[1]
    keys, values = (part.double().repeat_interleave(group, 0) for part in (key, value))
    scores = query.double() @ keys.transpose(1, 2) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    positions = torch.arange(num_keys)
    own = positions[num_keys - num_queries :, None]
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if layer.is_causal:
        is_seen &= positions <= own
    if layer.sliding_window is not None:
        is_seen &= positions > own - layer.sliding_window
    if layer.chunk_size is not None:
        is_seen &= positions // layer.chunk_size == own // layer.chunk_size
    weights = scores.masked_fill(~is_seen, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / total @ values).transpose(0, 1)


def geometry_of(group: int, head_dim: int) -> KVGeometry:
    layers = tuple(AttentionLayer(index, 0.4, None, None) for index in range(NUM_LAYERS))
    return KVGeometry(NUM_KV_HEADS * group, NUM_KV_HEADS, head_dim, layers)


def check_groups(dtype: torch.dtype = torch.float32) -> None:
    """Layers of two groups, one that attends within chunks, and one that reads another's KV: as the torch backend.

    A first step computes what a second, mixed one finds in the cache.
    """
    layers = (
        AttentionLayer(0, 0.4, None, None),
        AttentionLayer(1, 0.3, None, 10),
        AttentionLayer(2, 0.4, None, None, chunk_size=24),
        AttentionLayer(3, 0.4, None, None),
    )
    planes = (LayerPlane(0, 0, 0), LayerPlane(1, 1, 0), LayerPlane(2, 0, 1), LayerPlane(3, 0, 0, is_stored=False))
    geometry = KVGeometry(6, 2, 12, layers, value_size=8, further_groups=(LayerGroup(1, 8, 1, 16, 24),), planes=planes)
    layout = make_layout(geometry, num_blocks=24, block_size=8, dtype=dtype, model_fingerprint="")
    caches = [torch.zeros(layout.shape, dtype=dtype) for _ in range(2)]
    backends = (TritonAttention(caches[0], geometry, 8, 8), TorchAttention(caches[1], geometry, 8))
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(24, generator=generator).numpy()[:24].reshape(3, 8)
    steps = (
        BatchShape(np.array([0, 20, 61]), np.array([0, 0]), tables[:2]),
        BatchShape(np.array([0, 1, 6, 46]), np.array([20, 41, 0]), tables),
    )
    shared: list[Tensor] = []
    for shape in steps:
        batches = [backend.prepare(shape) for backend in backends]
        for layer in layers:
            group = geometry.groups[planes[layer.index].group]
            sizes = ((group.num_heads, group.key_size), (group.num_kv_heads, group.key_size))
            states = [
                torch.randn(heads, int(shape.query_starts[-1]), size, generator=generator).to(dtype)
                for heads, size in (*sizes, (group.num_kv_heads, group.value_size))
            ]
            if layer.index == 3:
                states[1:] = shared
            if layer.index == 0:
                shared = states[1:]
            output, expected = (batch.attend(layer, *states) for batch in batches)
            torch.testing.assert_close(output, expected, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert torch.equal(*caches)


def check(
    requests: tuple[tuple[int, int], ...],
    layer: AttentionLayer,
    *,
    head_dim: int = 4,
    block_size: int = 16,
    group: int = 3,
    dtype: torch.dtype = torch.float32,
    num_processors: int = 8,
) -> None:
    """Compute a step of these requests, whose blocks lie in a random order among blocks of NaN."""
    generator = torch.Generator().manual_seed(5)
    lengths = np.array(requests)
    blocks_each = -(-lengths.sum(axis=1) // block_size)
    order = torch.randperm(int(blocks_each.sum()) + 1, generator=generator).numpy()
    tables = np.zeros((len(requests), blocks_each.max()), dtype=np.int64)
    cache = torch.full((len(order), NUM_KV_HEADS, NUM_LAYERS, 2, block_size, head_dim), math.nan, dtype=dtype)
    states = [torch.randn(2, NUM_KV_HEADS, sum(length), head_dim, generator=generator).to(dtype) for length in requests]
    first = 0
    for index, ((computed, _), count) in enumerate(zip(requests, blocks_each, strict=True)):
        tables[index, :count] = order[first : first + count]
        first += count
        for position in range(computed):
            block = tables[index, position // block_size]
            cache[block, :, layer.index, :, position % block_size] = states[index][:, :, position].transpose(0, 1)
    backend = TritonAttention(cache, geometry_of(group, head_dim), block_size, num_processors)
    shape = BatchShape(np.concatenate([[0], np.cumsum(lengths[:, 1])]), lengths[:, 0], tables)
    fresh = torch.cat([state[:, :, computed:] for state, (computed, _) in zip(states, requests, strict=True)], dim=2)
    num_tokens = fresh.shape[2]
    # As a model's views are: a token's heads lie side by side.
    query = torch.randn(num_tokens, NUM_KV_HEADS * group, head_dim, generator=generator).to(dtype).transpose(0, 1)
    keys, values = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in fresh)

    sinks = torch.randn(NUM_KV_HEADS * group, generator=generator).to(dtype) + 2 if layer.has_sinks else None

    output = backend.prepare(shape).attend(layer, query, keys, values, sinks)

    queries = torch.split(query, lengths[:, 1].tolist(), dim=1)
    expected = torch.cat(
        [attend_in_float64(part, state[0], state[1], layer, sinks) for part, state in zip(queries, states, strict=True)]
    )
    torch.testing.assert_close(output.double(), expected, atol=ERROR[dtype], rtol=ERROR[dtype])
    for index, state in enumerate(states):
        stored = cache[tables[index, : blocks_each[index]], :, layer.index]
        stored = stored.permute(2, 1, 0, 3, 4).reshape(2, NUM_KV_HEADS, -1, head_dim)
        assert torch.equal(stored[:, :, : state.shape[2]], state)


@pytest.fixture(autouse=True)
def _split_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MIN_PART_KEYS", 32)


def layer_of(
    window: int | None = None,
    softcap: float | None = None,
    *,
    is_causal: bool = True,
    has_sinks: bool = False,
    chunk_size: int | None = None,
) -> AttentionLayer:
    return AttentionLayer(1, 0.4, softcap, window, is_causal, has_sinks, chunk_size=chunk_size)


def with_moderate_scores(layer: AttentionLayer, head_dim: int) -> AttentionLayer:
    """Scale scores to about 2 whatever the head size: float32 rounds scores of 40 by more than ERROR allows."""
    return replace(layer, scaling=2 * head_dim**-0.5)


class TestSample:
    def test_a_batch_of_all_kinds_of_requests(self) -> None:
        check(MIXED, layer_of())

    def test_tiles_of_queries_begin_and_end_within_chunks(self) -> None:
        check(MIXED, layer_of(chunk_size=24))

    @pytest.mark.parametrize("window", [None, 10])
    def test_sinks_count_once_however_many_parts_a_context_has(self, window: int | None) -> None:
        check(MIXED, layer_of(window, has_sinks=True))
        check(((300, 1), (0, 1), (31, 1)), layer_of(window, has_sinks=True), num_processors=500)

    def test_a_window_and_a_cap_in_16_bits(self) -> None:
        check(DECODES, layer_of(10, 1.5), dtype=torch.bfloat16, head_dim=80, block_size=24)

    def test_a_batch_of_fixed_size_is_filled_up_with_requests_that_touch_nothing(self) -> None:
        generator = torch.Generator().manual_seed(1)
        cache = torch.randn(3, 1, 1, 2, 4, 16, generator=generator)
        before = cache.clone()
        query, key, value = (torch.randn(2, heads, 16, generator=generator).transpose(0, 1) for heads in (2, 1, 1))
        starts, seq_lens, tables = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [7, 0], [[1, 2], [0, 0]]))
        place = [0, 128, 128, 4, 1]
        operators.write_kv(cache, key, value, torch.tensor([10, -1], dtype=torch.int32), place)
        for num_parts in (1, 2):
            output = torch.full((2, 2, 16), math.nan)
            operators.attend_tiles(
                output, query, cache, starts[:2], starts[:2], starts, seq_lens, tables,
                16, 1, num_parts, place, 0.3, 0.0, 0, 0, True,
            )  # fmt: skip
            stored = torch.cat([cache[1, 0, 0], cache[2, 0, 0, :, :3]], dim=1)
            expected = attend_in_float64(query[:, :1], stored[:1], stored[1:], AttentionLayer(0, 0.3, None, None))
            torch.testing.assert_close(output[:1].double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(output[1], torch.zeros(2, 16))
        before[2, 0, 0, :, 2] = torch.cat([key[:, 0], value[:, 0]])
        assert torch.equal(cache, before)

    def test_a_batch_in_memory_that_stays_gives_the_same(self) -> None:
        generator, size = torch.Generator().manual_seed(2), 5
        cache = torch.randn(12, NUM_KV_HEADS, NUM_LAYERS, 2, 16, 4, generator=generator)
        tables = torch.randperm(12, generator=generator).numpy()[:9].reshape(3, 3)
        shape = BatchShape(np.arange(4), np.array([40, 0, 31]), tables)
        heads = (3 * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        states = [torch.randn(size, num, 4, generator=generator).transpose(0, 1) for num in heads]
        blocks, offsets = token_slots(shape, 16)
        step = DecodeStep(
            *(np.zeros(3, dtype=np.int64), shape.num_computed, blocks * 16 + offsets, shape.seq_lens),
            block_tables=tables,
            begun_blocks=begun_blocks(shape, 16),
        )
        for layer in (layer_of(), layer_of(10, 1.5), layer_of(chunk_size=24)):
            eager, static = cache.clone(), cache.clone()
            expected = (
                TritonAttention(eager, geometry_of(3, 4), 16, 8)
                .prepare(shape)
                .attend(layer, *(part[:, :3] for part in states))
            )
            inputs = DecodeInputs(8, 6, static.device)
            inputs.clear()
            inputs.write(step, size, static)
            output = (
                TritonAttention(static, geometry_of(3, 4), 16, 8)
                .decode(inputs.attention(size), 96)
                .attend(layer, *states)
            )
            torch.testing.assert_close(output[:3], expected)
            assert not output[3:].any(), "rows without a request are zeros"
            assert torch.equal(static, eager), "and they write nothing"


class TestGroups:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_layers_whose_kv_differs_or_is_shared(self, dtype: torch.dtype) -> None:
        check_groups(dtype)

    def test_the_backend_passes_its_own_check_for_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The interpreter takes a minute for 700 tokens.
        mixed, long, *others = backend_check._BATCHES
        long = replace(long, requests=(backend_check._Request(90, 1),), longest_window=60)
        monkeypatch.setattr(backend_check, "_BATCHES", (mixed, long, *others))
        layers = (
            AttentionLayer(0, 0.1, None, None, chunk_size=8192),
            AttentionLayer(1, 0.1, None, 128, has_sinks=True),
        )
        geometry = KVGeometry(
            8, 2, 24, layers, value_size=16, further_groups=(LayerGroup(1, 8, 4, 16, 16),),
            planes=(LayerPlane(0, 0, 0), LayerPlane(1, 1, 0)),
        )  # fmt: skip
        needs = AttentionNeeds(torch.device("cpu"), torch.float32, geometry, 8, KeyOrder.PLAIN)
        assert find_fault(TritonKind(), needs) is None


class TestShapes:
    @pytest.mark.parametrize(
        ("reach", "softcap", "block_size", "group", "has_sinks"),
        list(itertools.product(REACHES, (None, 1.5), (1, 4, 16), (1, 3), (False, True))),
        ids=str,
    )
    def test_reaches_caps_blocks_groups_and_sinks(
        self, reach: Reach, softcap: float | None, block_size: int, group: int, has_sinks: bool
    ) -> None:
        layer = layer_of(reach.sliding_window, softcap, has_sinks=has_sinks, chunk_size=reach.chunk_size)
        check(MIXED, layer, block_size=block_size, group=group)

    @pytest.mark.parametrize("chunk_size", [1, 31, 32, 33, 64, 70, 8192])
    def test_chunks_of_any_size(self, chunk_size: int) -> None:
        check(((40, 40), (63, 1), (64, 1), (300, 1), (0, 33)), layer_of(chunk_size=chunk_size))

    @pytest.mark.parametrize("block_size", [24, 32, 48, 64, 128])
    def test_block_sizes(self, block_size: int) -> None:
        check((*DECODES, (9, 30)), layer_of(40), block_size=block_size)

    @pytest.mark.parametrize("group", [2, 5, 7, 8, 16, 33, 64])
    def test_query_heads_of_a_kv_head(self, group: int) -> None:
        dtype = torch.float32 if group <= 32 else torch.float16
        check(((40, 1), (0, 40)), layer_of(), group=group, dtype=dtype)


class TestTypes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 512])
    def test_head_sizes(self, head_dim: int, dtype: torch.dtype) -> None:
        layer = with_moderate_scores(layer_of(50), head_dim)
        check(((70, 1), (5, 40)), layer, head_dim=head_dim, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_sinks(self, dtype: torch.dtype) -> None:
        check(((70, 1), (5, 40), (300, 1)), layer_of(50, has_sinks=True), head_dim=64, group=8, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_chunks(self, dtype: torch.dtype) -> None:
        check(((70, 1), (5, 40), (300, 1)), layer_of(chunk_size=50), head_dim=128, group=5, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_attention_to_both_sides(self, dtype: torch.dtype) -> None:
        check(((0, 37), (0, 1), (0, 70)), layer_of(is_causal=False), dtype=dtype)

    @pytest.mark.parametrize("num_processors", [1, 2, 8, 500])
    @pytest.mark.parametrize("chunk_size", [None, 120])
    def test_any_number_of_parts(self, chunk_size: int | None, num_processors: int) -> None:
        check(((300, 1), (0, 1), (31, 1)), layer_of(chunk_size=chunk_size), num_processors=num_processors)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512], ids="head_{}".format)
class TestSizes:
    """Heads as models have them, and blocks that hold fewer, as many and more tokens than the kernels load at once."""

    @pytest.mark.parametrize(
        ("block_size", "group_and_dtype", "reach", "softcap", "has_sinks"),
        list(
            itertools.product(
                (32, 64, 128),
                ((1, torch.float32), (7, torch.float32), (4, torch.bfloat16)),
                (Reach(), Reach(50), Reach(chunk_size=50)),
                (None, 1.5),
                (False, True),
            )
        ),
        ids=str,
    )
    def test_blocks_groups_reaches_caps_and_sinks(
        self,
        head_dim: int,
        block_size: int,
        group_and_dtype: tuple[int, torch.dtype],
        reach: Reach,
        softcap: float | None,
        has_sinks: bool,
    ) -> None:
        group, dtype = group_and_dtype
        layer = layer_of(reach.sliding_window, softcap, has_sinks=has_sinks, chunk_size=reach.chunk_size)
        # The second request has more rows, group times its tokens, than a tile of few tokens can have.
        requests = ((140, 1), (60, 70 if group == 1 else 20))
        layer = with_moderate_scores(layer, head_dim)
        check(requests, layer, head_dim=head_dim, block_size=block_size, group=group, dtype=dtype)
