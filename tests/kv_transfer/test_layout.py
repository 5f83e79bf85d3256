"""The arithmetic of unequal ends, against a plain gather from, and scatter into, caches that know their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout import (
    KeyOrder,
    KVCacheLayout,
    KVGroup,
    piece_ids,
    piece_runs,
    piece_size,
    plan_transfer,
    rank_kv_heads,
)

NUM_BLOCKS = 24
TP_SIZES = (1, 2, 3, 4, 6, 8)
HEADS_OF_A_SHARE = [
    (heads, producer, consumer)
    for heads in (1, 2, 3, 4, 6, 8)
    for producer in TP_SIZES
    for consumer in TP_SIZES
    if all(heads % size == 0 or size % heads == 0 for size in (producer, consumer))
]


def layouts_of(heads: int, tp_size: int, block_size: int, num_layers: int, head_dim: int) -> list[KVCacheLayout]:
    """One layout for each rank of an engine."""
    replicas = max(1, tp_size // heads)
    return [
        KVCacheLayout(
            num_blocks=NUM_BLOCKS,
            num_kv_heads=max(1, heads // tp_size),
            num_layers=num_layers,
            block_size=block_size,
            head_dim=head_dim,
            dtype="uint16",
            dtype_size_bytes=2,
            model_fingerprint="m",
            tp_rank=rank,
            tp_size=tp_size,
            num_replicas=replicas,
        )
        for rank in range(tp_size)
    ]


@dataclass(frozen=True)
class Prompt:
    """[num_tokens, total_num_kv_heads, num_layers, 2, head_dim]: every element differs from every other."""

    kv: np.ndarray

    def scatter(self, layout: KVCacheLayout, block_ids: list[int]) -> np.ndarray:
        """A rank's cache that holds the prompt in these blocks, zeros elsewhere."""
        cache = np.zeros(layout.shape, dtype=np.uint16)
        for token, kv in enumerate(self.kv):
            block, slot = block_ids[token // layout.block_size], token % layout.block_size
            cache[block, :, :, :, slot] = kv[list(layout.kv_heads)]
        return cache


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[list[KVCacheLayout], list[KVCacheLayout], Prompt, tuple[list[int], list[int]]]:
    heads, producer_size, consumer_size = draw(st.sampled_from(HEADS_OF_A_SHARE))
    small, factor = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.permutations([small, small * factor]))
    num_layers, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    num_tokens = draw(st.integers(1, NUM_BLOCKS // 4)) * small * factor
    shape = (num_tokens, heads, num_layers, 2, head_dim)
    prompt = Prompt(np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint16).reshape(shape))
    blocks = [draw(st.permutations(range(NUM_BLOCKS)))[: num_tokens // size] for size in sizes]
    return (
        layouts_of(heads, producer_size, sizes[0], num_layers, head_dim),
        layouts_of(heads, consumer_size, sizes[1], num_layers, head_dim),
        prompt,
        (list(blocks[0]), list(blocks[1])),
    )


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_byte_of_every_consumer_rank_is_written_once_and_right(
    case: tuple[list[KVCacheLayout], list[KVCacheLayout], Prompt, tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    producers, consumers, prompt, (source_ids, target_ids) = case
    size = piece_size(producers[0].block_size, consumers[0].block_size)
    sources = piece_ids(source_ids, producers[0].block_size // size)
    targets = piece_ids(target_ids, consumers[0].block_size // size)
    first = data.draw(st.integers(0, len(sources) - 1))
    received = [np.zeros(layout.shape, dtype=np.uint16) for layout in consumers]
    num_writes = [np.zeros(layout.num_blocks * layout.block_size_bytes, dtype=np.int64) for layout in consumers]

    for route in plan_transfer(producers[0].total_num_kv_heads, len(producers), len(consumers)):
        producer, consumer = producers[route.producer_rank], consumers[route.consumer_rank]
        source = prompt.scatter(producer, source_ids).reshape(-1).view(np.uint8)
        runs = piece_runs(producer, route.kv_heads, size, sources[first:])
        wire = np.concatenate([source[start : start + runs.size_bytes] for start in runs.starts])
        runs = piece_runs(consumer, route.kv_heads, size, targets[first:])
        assert len(wire) == len(runs.starts) * runs.size_bytes
        flat = received[route.consumer_rank].reshape(-1).view(np.uint8)
        for index, start in enumerate(runs.starts.tolist()):
            assert size == consumer.block_size or start % runs.size_bytes == 0
            flat[start : start + runs.size_bytes] = wire[index * runs.size_bytes : (index + 1) * runs.size_bytes]
            num_writes[route.consumer_rank][start : start + runs.size_bytes] += 1

    kept = Prompt(np.where(np.arange(len(prompt.kv))[:, None, None, None, None] >= first * size, prompt.kv, 0))
    for consumer, cache, writes in zip(consumers, received, num_writes, strict=True):
        expected = kept.scatter(consumer, target_ids)
        assert np.array_equal(cache, expected)
        is_written = expected.reshape(-1) != 0
        assert np.array_equal(writes, np.repeat(is_written, 2).astype(np.int64))


@pytest.mark.parametrize(("heads", "producer_size", "consumer_size"), HEADS_OF_A_SHARE)
def test_replicas_share_the_load_evenly(heads: int, producer_size: int, consumer_size: int) -> None:
    routes = plan_transfer(heads, producer_size, consumer_size)
    assert len({(route.producer_rank, route.consumer_rank) for route in routes}) == len(routes)

    for head in range(heads):
        holders = [rank for rank in range(producer_size) if head in rank_kv_heads(heads, producer_size, rank)]
        senders = Counter(route.producer_rank for route in routes if head in route.kv_heads)
        assert set(senders) <= set(holders)
        loads = [senders[rank] for rank in holders]
        assert max(loads) - min(loads) <= 1


def test_equal_ends_exchange_whole_blocks_with_their_own_rank_only() -> None:
    assert [(r.producer_rank, r.consumer_rank, r.kv_heads) for r in plan_transfer(8, 4, 4)] == [
        (rank, rank, range(2 * rank, 2 * rank + 2)) for rank in range(4)
    ]
    layout = layouts_of(8, 4, 16, 2, 4)[1]
    runs = piece_runs(layout, range(2, 4), 16, [5, 6, 9])
    assert (runs.starts / layout.block_size_bytes).tolist() == [5, 6, 9]
    assert runs.size_bytes == layout.block_size_bytes


def test_a_block_of_several_pieces_is_one_run_per_head_layer_and_key_or_value() -> None:
    layout = layouts_of(4, 2, 8, 3, 4)[0]
    assert len(piece_runs(layout, range(1), 4, [7]).starts) == 1 * 3 * 2
    assert len(piece_runs(layout, range(2), 2, [7, 8]).starts) == 2 * 2 * 3 * 2


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="6 KV heads cannot be shared by 4 ranks"):
        rank_kv_heads(6, 4, 0)
    with pytest.raises(ValueError, match="6 KV heads cannot be shared by 4 ranks"):
        plan_transfer(6, 2, 4)


def test_block_sizes_that_are_no_multiples_are_refused() -> None:
    assert piece_size(32, 8) == piece_size(8, 32) == 8
    with pytest.raises(ValueError, match="block sizes 12 and 8"):
        piece_size(12, 8)


def test_a_layout_knows_its_heads() -> None:
    layout = layouts_of(2, 8, 16, 2, 4)[5]
    assert (layout.total_num_kv_heads, layout.kv_heads) == (2, range(1, 2))
    assert replace(layout, tp_size=1, tp_rank=0, num_replicas=1, num_kv_heads=6).kv_heads == range(6)


def test_blocks_whose_bytes_mean_something_else_have_another_content_key() -> None:
    (layout,) = layouts_of(2, 1, 16, 2, 4)
    group = KVGroup(num_layers=1, num_kv_heads=1, key_size=576, value_size=0, dtype="uint16")
    others = [
        replace(layout, key_order=KeyOrder.TRANSPOSED),
        replace(layout, further_groups=(group,)),
        replace(layout, block_size=32),
        replace(layout, model_fingerprint="n"),
    ]
    keys = [one.content_key for one in (layout, *others)]
    assert len(set(keys)) == len(keys)
    assert replace(layout, num_blocks=7).content_key == layout.content_key
