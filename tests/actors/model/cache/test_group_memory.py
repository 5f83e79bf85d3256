"""Layers with KV of different shapes in one cache: each reads what it has written, and nothing else.

Tests of actors/model/cache/kv_groups.py, actors/model/attention/probe.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.model.attention.backend import AttentionNeeds
from actors.model.attention.backend_check import attend_densely
from actors.model.attention.batch_attention import AttentionLayer, BatchAttention, BatchShape
from actors.model.attention.probe import GeometryProbe, KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.attention.triton_backend import find_uncovered
from actors.model.attention.vllm_cpu_backend import VllmCpuKind
from actors.model.cache.group_memory import group_memories
from actors.model.cache.kv_cache import make_layout
from actors.model.cache.kv_groups import LayerGroup, LayerPlane, RecurrentState, StatePart
from actors.model.errors import UnsupportedModel
from kv_transfer.layout import KeyOrder


@dataclass(frozen=True)
class Layer:
    """A layer of a model that is made up: its heads, KV heads and widths, and the layer whose KV it reads."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    asks: AttentionLayer
    source: int | None = None


@dataclass(frozen=True)
class Model:
    """Attends as a model's layers would, over KV that is drawn for each layer, for sequences of this many tokens."""

    layers: tuple[Layer, ...]
    num_tokens: int
    seed: int

    def drawn(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each layer's queries, keys and values, [heads, num_tokens, width]."""
        generator = torch.Generator().manual_seed(self.seed)
        states: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in self.layers:
            query = torch.randn(layer.num_heads, self.num_tokens, layer.key_size, generator=generator)
            if layer.source is not None:
                states.append((query, *states[layer.source][1:]))
                continue
            key = torch.randn(layer.num_kv_heads, self.num_tokens, layer.key_size, generator=generator)
            value = torch.randn(layer.num_kv_heads, self.num_tokens, layer.value_size, generator=generator)
            states.append((query, key, key[..., : layer.value_size] if layer.asks.value_size else value))
        return states

    def run(self, batch: BatchAttention, tokens: slice) -> list[Tensor]:
        """Attend with these tokens, layer after layer. A layer that reads another's KV is given the same tensors."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer, (query, key, value) in zip(self.layers, self.drawn(), strict=True):
            if layer.source is not None:
                parts.append((query[:, tokens], *parts[layer.source][1:]))
            else:
                parts.append((query[:, tokens], key[:, tokens], value[:, tokens]))
        return [batch.attend(layer.asks, *part) for layer, part in zip(self.layers, parts, strict=True)]

    def geometry(self) -> KVGeometry:
        probe = GeometryProbe("m")
        self.run(probe, slice(0, 3))
        return probe.geometry()


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers: list[Layer] = []
    for index in range(draw(st.integers(1, 5))):
        window, chunk = draw(st.sampled_from([(None, None), (5, None), (None, 8)]))
        asks = AttentionLayer(index, 0.3, None, window, chunk_size=chunk)
        owners = [number for number, layer in enumerate(layers) if layer.source is None]
        shares: bool = draw(st.booleans())
        if owners and shares:
            source = draw(st.sampled_from(owners))
            asks = replace(asks, value_size=layers[source].asks.value_size)
            layers.append(replace(layers[source], asks=asks, source=source))
            continue
        num_kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
        key_size, value_size = draw(st.sampled_from([(4, 4), (6, 4), (8, 8), (6, None)]))
        if value_size is None:
            asks, value_size = replace(asks, value_size=4), 4
        layers.append(Layer(num_kv_heads * group, num_kv_heads, key_size, value_size, asks))
    return Model(tuple(layers), draw(st.integers(4, 40)), draw(st.integers(0, 99)))


@given(models(), st.data(), st.sampled_from(KeyOrder), st.sampled_from([1, 4, 16]))
@settings(max_examples=40, deadline=None)
def test_layers_of_all_shapes_attend_as_written_out(
    model: Model, data: st.DataObject, key_order: KeyOrder, block_size: int
) -> None:
    geometry = model.geometry()
    num_blocks = -(-model.num_tokens // block_size)
    layout = make_layout(
        geometry, num_blocks=num_blocks + 1, block_size=block_size, dtype=torch.float32, model_fingerprint=""
    )
    # Whatever no token of the sequence has written is NaN: reading it would show.
    cache = torch.full(layout.shape, float("nan"))
    backend = TorchAttention(cache, geometry, block_size, key_order=key_order)
    table = 1 + np.arange(num_blocks)[None, ::-1]
    edges = sorted({0, model.num_tokens, *data.draw(st.lists(st.integers(1, model.num_tokens), max_size=3))})
    outputs: list[list[Tensor]] = [[] for _ in model.layers]

    for start, stop in itertools.pairwise(edges):
        shape = BatchShape(np.array([0, stop - start]), np.array([start]), table)
        for rows, output in zip(outputs, model.run(backend.prepare(shape), slice(start, stop)), strict=True):
            rows.append(output)

    for layer, rows, (query, key, value) in zip(model.layers, outputs, model.drawn(), strict=True):
        expected = attend_densely(query, key, value, layer.asks)
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=1e-5)
    assert cache[0].isnan().all(), "the block of another request is as it was"


@given(models(), st.sampled_from([1, 4, 16]))
@settings(max_examples=30, deadline=None)
def test_the_backend_and_the_transfers_agree_on_where_a_group_is(model: Model, block_size: int) -> None:
    geometry = model.geometry()
    layout = make_layout(geometry, num_blocks=2, block_size=block_size, dtype=torch.float32, model_fingerprint="")

    for memory, group in zip(group_memories(geometry, block_size), layout.block_groups, strict=True):
        assert 4 * memory.offset == group.offset_bytes
        assert 4 * memory.head_distance == group.head_size_bytes
        assert 4 * memory.block_size_numbers == layout.block_size_bytes
    assert np.prod(layout.shape) * 4 == 2 * layout.block_size_bytes


FULL = AttentionLayer(0, 0.3, None, None)


def test_a_layer_that_is_given_another_layers_kv_has_no_plane_of_its_own() -> None:
    small, large = Layer(2, 1, 4, 4, FULL), Layer(2, 1, 8, 8, replace(FULL, index=1))
    reads_small = replace(small, asks=replace(FULL, index=2), source=0)
    reads_large = replace(large, asks=replace(FULL, index=3), source=1)

    geometry = Model((small, large, reads_small, reads_large), 5, 0).geometry()

    assert geometry.groups == (LayerGroup(1, 2, 1, 4, 4), LayerGroup(1, 2, 1, 8, 8))
    assert geometry.planes == (
        LayerPlane(0, 0, 0),
        LayerPlane(1, 1, 0),
        LayerPlane(2, 0, 0, is_stored=False),
        LayerPlane(3, 1, 0, is_stored=False),
    )


def test_like_layers_form_one_group_with_a_plane_for_each() -> None:
    model = Model(tuple(Layer(4, 2, 8, 8, replace(FULL, index=index)) for index in range(3)), 5, 0)

    geometry = model.geometry()

    assert (geometry.further_groups, geometry.planes, geometry.value_size) == ((), (), None)
    assert geometry.irregularity is None
    assert geometry.groups == (LayerGroup(3, 4, 2, 8, 8),)


def test_layers_that_are_alike_on_one_rank_are_two_groups_if_ranks_share_the_heads_of_one() -> None:
    probe = GeometryProbe("m")
    Model((Layer(2, 1, 4, 4, FULL), Layer(2, 1, 4, 4, replace(FULL, index=1))), 5, 0).run(probe, slice(0, 3))

    geometry = probe.geometry(lambda layer: 2 - layer)

    assert [(group.num_planes, group.num_replicas) for group in geometry.groups] == [(1, 2), (1, 1)]
    assert geometry.num_replicas == 2


def test_queries_that_do_not_fit_the_keys_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="queries, keys and values do not fit each other"):
        GeometryProbe("m").attend(FULL, torch.zeros(2, 3, 8), torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((Layer(2, 1, 4, 4, FULL), Layer(2, 2, 4, 4, replace(FULL, index=1))), "its layers form 2 groups"),
        ((Layer(2, 1, 6, 4, FULL),), "keys have 6 numbers and values 4"),
        ((Layer(2, 1, 6, 4, replace(FULL, value_size=4)),), "it has latent attention (MLA)"),
        (
            (Layer(2, 1, 4, 4, FULL), Layer(2, 1, 4, 4, replace(FULL, index=1), 0)),
            "some of its layers have no KV of their own",
        ),
        ((Layer(2, 1, 4, 4, replace(FULL, chunk_size=8)),), "some of its layers attend within chunks"),
    ],
)
def test_vllm_cpu_refuses_layers_that_differ_by_name_and_triton_refuses_latents_only(
    layers: tuple[Layer, ...], says: str
) -> None:
    geometry = Model(layers, 5, 0).geometry()
    needs = AttentionNeeds(torch.device("cpu"), torch.float32, geometry, 32, KeyOrder.PLAIN)

    assert VllmCpuKind().find_obstacle(needs) == f"{geometry.irregularity}, which only the other backends serve"
    assert str(geometry.irregularity).startswith(says)
    is_latent = geometry.value_size == 0
    expected = f"{geometry.irregularity}, which only the torch backend serves" if is_latent else None
    assert find_uncovered(needs) == expected


def test_a_state_has_the_bytes_of_its_parts() -> None:
    state = RecurrentState((StatePart(0, "conv", (8, 3), torch.bfloat16), StatePart(0, "ssm", (2, 4), torch.float32)))

    assert state.size_bytes == 48 + 32
