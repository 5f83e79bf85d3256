"""Latent attention gives the same result expanded, absorbed, and written out over keys and values of each head."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from actors.model.attention import latent_heads
from actors.model.attention.backend_check import attend_densely
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.latent_heads import LatentHeads, attend_sequence
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.errors import UnsupportedModel
from kv_transfer.layout import KeyOrder

NUM_HEADS, NUM_LAYERS, RANK, ROTARY, KEY = 3, 2, 10, 4, 6
VALUE_SIZES = (5, 10, 12)
"""Shorter than a key with its rotary part, as long, and longer."""
SCALING = 0.3
LAYERS = tuple(AttentionLayer(index, SCALING, None, None, value_size=RANK) for index in range(NUM_LAYERS))
GEOMETRY = KVGeometry(NUM_HEADS, 1, RANK + ROTARY, LAYERS, value_size=0)


def heads_of(value_size: int, seed: int = 0) -> LatentHeads:
    weight = torch.randn(NUM_HEADS, KEY + value_size, RANK, generator=torch.Generator().manual_seed(seed))
    return LatentHeads(weight, KEY)


def attend_written_out(query: Tensor, latents: Tensor, heads: LatentHeads) -> Tensor:
    """Attend as attend_sequence() does, with the keys and values that transformers' expand_kv() makes."""
    made = torch.einsum("kr,hnr->hkn", latents[:, :RANK], heads.weight)
    keys = torch.cat([made[..., :KEY], latents[:, RANK:].expand(NUM_HEADS, -1, -1)], dim=-1)
    return attend_densely(query, keys, made[..., KEY:], AttentionLayer(0, SCALING, None, None))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("expands", [True, False])
def test_both_ways_give_what_is_written_out(value_size: int, expands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, latents, query = heads_of(value_size), drawn(9, RANK + ROTARY, seed=1), drawn(NUM_HEADS, 9, 10, seed=2)
    monkeypatch.setattr(LatentHeads, "expansion_pays", lambda self, num_queries, num_keys: expands)

    attended = attend_sequence(query, latents, None, heads, SCALING)

    torch.testing.assert_close(attended, attend_written_out(query, latents, heads), atol=1e-5, rtol=1e-5)


def test_heads_whose_keys_take_too_much_memory_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, latents, query = heads_of(12), drawn(9, RANK + ROTARY, seed=1), drawn(NUM_HEADS, 9, 10, seed=2)
    sizes: list[int] = []
    expand = LatentHeads.expand

    def counted(self: LatentHeads, latents: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        keys, values = expand(self, latents, part)
        sizes.append(keys.numel() + values.numel())
        return keys, values

    monkeypatch.setattr(LatentHeads, "expand", counted)
    monkeypatch.setattr(LatentHeads, "expansion_pays", lambda self, num_queries, num_keys: True)
    monkeypatch.setattr(latent_heads, "_MAX_EXPANDED", 2 * 2 * 9 * 12)

    attended = attend_sequence(query, latents, None, heads, SCALING)

    assert sizes == [2 * 2 * 9 * 12, 2 * 9 * 12]
    torch.testing.assert_close(attended, attend_written_out(query, latents, heads), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "pays"),
    [(1, 4096, False), (128, 32768, False), (256, 32768, True), (512, 512, True), (4096, 4096, True)],
)
def test_many_queries_for_the_tokens_there_are_pay_for_their_expansion(
    num_queries: int, num_keys: int, pays: bool
) -> None:
    deepseek_v3 = LatentHeads(torch.empty(128, 128 + 128, 512, device="meta"), 128)

    assert deepseek_v3.expansion_pays(num_queries, num_keys) is pays


@given(
    st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(VALUE_SIZES),
    st.sampled_from(KeyOrder),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_batch_attends_to_the_latents_of_its_requests_as_written_out(
    sequences: list[tuple[int, int]], block_size: int, value_size: int, key_order: KeyOrder, expands: bool
) -> None:
    blocks_each = [-(-(computed + count) // block_size) for computed, count in sequences]
    order = torch.randperm(sum(blocks_each) + 1, generator=torch.Generator().manual_seed(len(sequences))).numpy()
    # Whatever the batch does not own is NaN: reading it would show.
    cache = torch.full((len(order), NUM_LAYERS * block_size * (RANK + ROTARY)), float("nan"))
    backend = TorchAttention(cache, GEOMETRY, block_size, key_order=key_order)
    tables = np.zeros((len(sequences), max(blocks_each)), dtype=np.int64)
    heads, first_block = heads_of(value_size), 0
    latents = [drawn(1, sum(lengths), RANK + ROTARY, seed=index) for index, lengths in enumerate(sequences)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentHeads, "expansion_pays", lambda self, num_queries, num_keys: expands)
        for index, (computed, _) in enumerate(sequences):
            tables[index, : blocks_each[index]] = order[first_block : first_block + blocks_each[index]]
            first_block += blocks_each[index]
            if computed:
                before = BatchShape(np.array([0, computed]), np.array([0]), tables[index : index + 1])
                query = drawn(NUM_HEADS, computed, KEY + ROTARY, seed=9)
                backend.prepare(before).attend_latent(LAYERS[1], query, latents[index][:, :computed], heads)
        lengths = np.array(sequences)
        shape = BatchShape(np.concatenate([[0], np.cumsum(lengths[:, 1])]), lengths[:, 0], tables)
        fresh = torch.cat([one[:, computed:] for one, (computed, _) in zip(latents, sequences, strict=True)], dim=1)
        query = drawn(NUM_HEADS, fresh.shape[1], KEY + ROTARY, seed=8)

        output = backend.prepare(shape).attend_latent(LAYERS[1], query, fresh, heads)

    queries = torch.split(query, lengths[:, 1].tolist(), dim=1)
    expected = [attend_written_out(part, one[0], heads) for part, one in zip(queries, latents, strict=True)]
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-4, rtol=1e-4)


def attention_module(layer: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(kv_b_proj=layer, qk_nope_head_dim=KEY, v_head_dim=5, kv_lora_rank=RANK)


def test_the_matrices_are_read_without_a_copy() -> None:
    layer = nn.Linear(RANK, NUM_HEADS * (KEY + 5), bias=False)

    heads = LatentHeads.of(attention_module(layer))

    assert (heads.num_heads, heads.rank, heads.value_size) == (NUM_HEADS, RANK, 5)
    assert heads.weight.data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("layer", [nn.Linear(RANK, NUM_HEADS * (KEY + 5)), nn.Linear(RANK, 7, bias=False), nn.Module()])
def test_a_layer_that_is_no_plain_matrix_is_refused(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedModel, match="kv_b_proj, which expands its latents, is quantized or has a bias"):
        LatentHeads.of(attention_module(layer))
