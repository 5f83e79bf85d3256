"""Caches of models whose layers differ: every group's heads arrive once, in their own place of the block.

Tests of kv_transfer/layout.py, kv_transfer/block_pieces.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.block_pieces import PieceMap
from kv_transfer.layout import KVCacheLayout, KVGroup, plan_pairs, plan_transfer, rank_kv_heads
from kv_transfer.links.link_compatibility import PairingFacts, find_mismatch
from tests.kv_transfer.connected_workers import LAYOUT, connected_pair

NUM_BLOCKS, BLOCK_SIZE = 6, 2
Shape = tuple[int, int, int, int]
"""The KV heads of all ranks, the layers, and the widths of K and V of one group."""


def layout_of(shapes: list[Shape], tp_size: int, tp_rank: int) -> KVCacheLayout:
    """A rank's layout: the first shape is the first group."""
    groups = [
        KVGroup(
            num_layers=layers,
            num_kv_heads=len(rank_kv_heads(heads, tp_size, tp_rank)),
            key_size=key_size,
            value_size=value_size,
            dtype="int64",
            num_replicas=max(1, tp_size // heads),
        )
        for heads, layers, key_size, value_size in shapes
    ]
    first = groups[0]
    return KVCacheLayout(
        num_blocks=NUM_BLOCKS,
        num_kv_heads=first.num_kv_heads,
        num_layers=first.num_layers,
        block_size=BLOCK_SIZE,
        head_dim=first.key_size,
        dtype="int64",
        dtype_size_bytes=8,
        model_fingerprint="m",
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_replicas=first.num_replicas,
        further_groups=tuple(groups[1:]),
        value_size=None if first.value_size == first.key_size else first.value_size,
    )


def written(layout: KVCacheLayout, block_ids: list[int]) -> Tensor:
    """A rank's cache whose blocks hold the parts of one prompt: each number says what it is and where it belongs."""
    cache = torch.zeros(layout.shape, dtype=torch.int64)
    blocks = cache.view(NUM_BLOCKS, -1).numpy()
    for index, group in enumerate(layout.block_groups):
        per_head = group.head_size_bytes // 8
        for place, block_id in enumerate(block_ids):
            for row, head in enumerate(group.kv_heads):
                start = group.offset_bytes // 8 + row * per_head
                first = 1 + ((place * 8 + index) * 16 + head) * 1000
                blocks[block_id, start : start + per_head] = np.arange(first, first + per_head)
    return cache


SHAPES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))


@given(
    st.lists(SHAPES, min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.permutations(range(NUM_BLOCKS)),
)
@settings(max_examples=60, deadline=None)
def test_every_head_of_every_group_arrives_once_at_every_rank_that_holds_it(
    shapes: list[Shape], producer_size: int, consumer_size: int, order: list[int]
) -> None:
    source_ids, target_ids = order[:3], order[3:]
    producers = [layout_of(shapes, producer_size, rank) for rank in range(producer_size)]
    consumers = [layout_of(shapes, consumer_size, rank) for rank in range(consumer_size)]
    sources = [written(layout, source_ids) for layout in producers]
    received = [torch.zeros(layout.shape, dtype=torch.int64) for layout in consumers]
    num_bytes = 0

    for producer, consumer in plan_pairs([shape[0] for shape in shapes], producer_size, consumer_size):
        ours, theirs = producers[producer], consumers[consumer]
        sender = PieceMap(ours, theirs, sources[producer], is_producer=True)
        receiver = PieceMap(theirs, ours, received[consumer], is_producer=False)
        assert sender.piece_size_bytes == receiver.piece_size_bytes
        sent, _ = sender.messages(sender.ids(source_ids))
        posted, _ = receiver.messages(receiver.ids(target_ids))
        for message, target in zip(sent, posted, strict=True):
            assert message.is_contiguous()
            assert target.is_contiguous()
            assert not target.any(), "no byte comes twice"
            target.copy_(message)
            num_bytes += message.nbytes

    for layout, cache in zip(consumers, received, strict=True):
        assert torch.equal(cache, written(layout, target_ids))
    assert num_bytes == sum(len(target_ids) * layout.block_size_bytes for layout in consumers)


def test_like_layers_keep_the_one_tensor_and_its_fingerprint_for_stores() -> None:
    layout = layout_of([(2, 3, 4, 4)], 1, 0)

    assert layout.is_plain
    assert layout.shape == (NUM_BLOCKS, 2, 3, 2, BLOCK_SIZE, 4)
    # A store on disk outlives the engine: the key is that of earlier versions.
    assert layout.content_key == "fc7d5e6ac3c16f13ff9798d7d1929060"


def test_a_block_of_latent_attention_has_one_vector_for_each_token_and_layer() -> None:
    # DeepSeek-V3: 61 layers, 512 numbers and a rotary key of 64, in bfloat16.
    layout = KVCacheLayout(10, 1, 61, 16, 576, "bfloat16", 2, "m", tp_size=4, num_replicas=4, value_size=0)

    assert layout.slot_size_bytes == layout.total_token_size_bytes == 61 * 1152
    assert layout.shape == (10, 16 * 61 * 576)
    assert layout.total_num_kv_heads == 1


def test_a_state_takes_no_bytes_of_a_block() -> None:
    state = KVGroup(1, 1, 1, 0, "float32", bytes_per_request=4096)
    layout = replace(layout_of([(2, 3, 4, 4)], 1, 0), further_groups=(state,))

    assert layout.block_size_bytes == layout_of([(2, 3, 4, 4)], 1, 0).block_size_bytes
    assert layout.state_size_bytes == 4096


def test_ranks_with_the_same_heads_of_one_group_have_different_content_for_another() -> None:
    shapes = [(1, 1, 4, 4), (2, 1, 4, 4)]
    layouts = [layout_of(shapes, 2, rank) for rank in range(2)]

    assert layouts[0].kv_heads == layouts[1].kv_heads
    assert layouts[0].content_key != layouts[1].content_key


def test_a_head_that_several_producers_hold_travels_on_one_link_only() -> None:
    pairs = plan_pairs([2, 1], 2, 1)
    assert pairs == ((0, 0), (1, 0))
    assert [route.producer_rank for route in plan_transfer(1, 2, 1)] == [0]

    shapes = [(2, 1, 4, 4), (1, 1, 2, 2)]
    consumer = layout_of(shapes, 1, 0)
    sizes = []
    for rank in range(2):
        layout = layout_of(shapes, 2, rank)
        pieces = PieceMap(layout, consumer, written(layout, [0]), is_producer=True)
        sizes.append(len(pieces.messages([0])[0]))
    assert sizes == [2, 1]


def test_a_chunk_of_several_runs_a_block_counts_its_blocks() -> None:
    group = KVGroup(num_layers=3, num_kv_heads=1, key_size=16, value_size=4, dtype="float32")
    layout = replace(LAYOUT, further_groups=(group,))
    ids = (17, 3, 29)
    with connected_pair("loopback", producer_layout=layout, consumer_layout=layout) as pair:
        pair.hand_over("a", ids, ids, 10)
        assert torch.equal(pair.consumer.cache[list(ids)], pair.producer.cache[list(ids)])
        stats = pair.consumer.stats()
        assert (stats.num_received_blocks, stats.num_received_bytes) == (3, 3 * layout.block_size_bytes)


def facts(shapes: list[Shape], **changes: int) -> PairingFacts:
    layout = replace(layout_of(shapes, 1, 0), **changes)  # type: ignore[arg-type]  # integers only
    return PairingFacts.of_rank(layout, "tcp", checksum=False, is_on_gpu=False)


@pytest.mark.parametrize("shapes", [[(2, 1, 4, 4), (2, 1, 8, 8)], [(2, 1, 4, 2)]])
def test_blocks_of_several_shapes_are_not_cut(shapes: list[Shape]) -> None:
    mismatch = find_mismatch(facts(shapes), facts(shapes, block_size=2 * BLOCK_SIZE), "one", "other")

    assert mismatch == (
        "block_size: 2 at one, 4 at other, which only models may have whose layers all have KV of one shape"
    )
    assert find_mismatch(facts(shapes), facts(shapes), "one", "other") is None


def test_groups_are_compared_over_all_ranks() -> None:
    shapes = [(2, 1, 4, 4), (4, 2, 8, 4)]
    split = PairingFacts.of_rank(layout_of(shapes, 4, 3), "tcp", checksum=False, is_on_gpu=False)
    assert find_mismatch(facts(shapes), split, "one", "other") is None

    other = facts([(2, 1, 4, 4), (4, 2, 8, 8)])
    assert str(find_mismatch(facts(shapes), other, "one", "other")).startswith("further groups of layers: ")


def test_heads_of_a_further_group_that_no_ranks_can_share_are_refused() -> None:
    layout = layout_of([(2, 1, 4, 4), (2, 1, 8, 8)], 2, 0)
    broken = replace(layout.further_groups[0], num_kv_heads=3, num_replicas=4)

    with pytest.raises(ValueError, match="3 KV heads on each of 2 ranks and num_replicas = 4"):
        replace(layout, further_groups=(broken,))
