"""Transfers between ranks that differ in their heads or in their block size, over loopback and over a CPU transport.

Tests of kv_transfer/block_pieces.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.layout import KVCacheLayout
from tests.kv_transfer.connected_workers import LAYOUT, Join, Pair, connected_pair

SMALL_IDS, LARGE_IDS = (17, 3, 29, 8, 1, 20), (5, 2)
NUM_TOKENS = 22
"""Six blocks of four, the last one half full; two of sixteen, the last one six tokens full."""

SMALL, LARGE = LAYOUT, replace(LAYOUT, block_size=16, num_blocks=8)
FOUR_HEADS = replace(LAYOUT, num_kv_heads=4)


def rank_of(layout: KVCacheLayout, tp_rank: int, tp_size: int) -> KVCacheLayout:
    replicas = max(1, tp_size // layout.num_kv_heads)
    share = max(1, layout.num_kv_heads // tp_size)
    return replace(layout, num_kv_heads=share, tp_rank=tp_rank, tp_size=tp_size, num_replicas=replicas)


Ids = tuple[int, ...]


def unequal_blocks(is_producer_large: bool) -> tuple[tuple[KVCacheLayout, KVCacheLayout], tuple[Ids, Ids]]:
    if is_producer_large:
        return (LARGE, SMALL), (LARGE_IDS, SMALL_IDS)
    return (SMALL, LARGE), (SMALL_IDS, LARGE_IDS)


def tokens(cache: Tensor, block_ids: Sequence[int]) -> Tensor:
    """[blocks * block_size, num_kv_heads, num_layers, 2, head_dim]: the slots of these blocks in order."""
    return cache[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)


def hand_over_in_chunks(pair: Pair, source_ids: Sequence[int], target_ids: Sequence[int], *, local: int = 0) -> None:
    pair.begin("a", target_ids, NUM_TOKENS, local)
    for before, after in ((0, 5), (5, 18), (18, NUM_TOKENS)):
        pair.producer.compute("a", source_ids, before, after)
    pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
    received = pair.consumer.wait_received("a")
    assert (received.outcome, received.num_valid_tokens, received.first_token_id) == (LoadOutcome.LOADED, NUM_TOKENS, 7)
    pair.producer.wait_finished_sending("a")


@pytest.mark.parametrize("join", ["loopback", "tcp", "shared memory"])
@pytest.mark.parametrize("is_producer_large", [False, True])
def test_blocks_of_one_size_become_blocks_of_another(is_producer_large: bool, join: Join) -> None:
    ends, ids = unequal_blocks(is_producer_large)
    with connected_pair(join, producer_layout=ends[0], consumer_layout=ends[1]) as pair:
        hand_over_in_chunks(pair, *ids)
        source, target = tokens(pair.producer.cache, ids[0]), tokens(pair.consumer.cache, ids[1])
        assert torch.equal(target[:NUM_TOKENS], source[:NUM_TOKENS])
        others = [block for block in range(ends[1].num_blocks) if block not in ids[1]]
        assert not pair.consumer.cache[others].any()
        assert pair.consumer.stats().num_received_bytes == 6 * SMALL.block_size_bytes


@pytest.mark.parametrize("is_producer_large", [False, True])
def test_pieces_of_one_block_may_travel_in_chunks_of_their_own(is_producer_large: bool) -> None:
    ends, ids = unequal_blocks(is_producer_large)
    one_piece = KVTransferConfig(max_chunk_bytes=1)
    with connected_pair("loopback", one_piece, producer_layout=ends[0], consumer_layout=ends[1]) as pair:
        hand_over_in_chunks(pair, *ids)
        source, target = tokens(pair.producer.cache, ids[0]), tokens(pair.consumer.cache, ids[1])
        assert torch.equal(target[:NUM_TOKENS], source[:NUM_TOKENS])
        assert pair.consumer.stats().num_received_chunks == 6


@pytest.mark.parametrize("leftover", [float("nan"), 3.0])
def test_what_a_prompt_leaves_of_a_larger_block_becomes_zero(leftover: float) -> None:
    with connected_pair("loopback", producer_layout=SMALL, consumer_layout=LARGE) as pair:
        pair.consumer.cache.fill_(leftover)
        hand_over_in_chunks(pair, SMALL_IDS, LARGE_IDS)
        assert not tokens(pair.consumer.cache, LARGE_IDS)[24:].any(), "six pieces of four tokens were sent"


@pytest.mark.parametrize(("is_producer_large", "local"), [(False, 1), (True, 2), (True, 4)])
def test_local_blocks_are_not_sent_whatever_their_size(is_producer_large: bool, local: int) -> None:
    ends, ids = unequal_blocks(is_producer_large)
    with connected_pair("loopback", producer_layout=ends[0], consumer_layout=ends[1]) as pair:
        hand_over_in_chunks(pair, *ids, local=local)
        num_local_tokens = local * ends[1].block_size
        source, target = tokens(pair.producer.cache, ids[0]), tokens(pair.consumer.cache, ids[1])
        assert not target[:num_local_tokens].any()
        assert torch.equal(target[num_local_tokens:NUM_TOKENS], source[num_local_tokens:NUM_TOKENS])


@pytest.mark.parametrize("join", ["loopback", "tcp", "shared memory"])
def test_a_range_of_heads_goes_to_the_rank_that_holds_it(join: Join) -> None:
    whole, half = FOUR_HEADS, rank_of(FOUR_HEADS, 1, 2)
    ids = SMALL_IDS
    with connected_pair(join, producer_layout=whole, consumer_layout=half) as pair:
        hand_over_in_chunks(pair, ids, ids)
        assert torch.equal(pair.consumer.cache[list(ids)], pair.producer.cache[list(ids), 2:4])
    with connected_pair(join, producer_layout=half, consumer_layout=whole) as pair:
        hand_over_in_chunks(pair, ids, ids)
        assert torch.equal(pair.consumer.cache[list(ids), 2:4], pair.producer.cache[list(ids)])
        assert not pair.consumer.cache[:, :2].any()


def test_heads_and_block_sizes_may_differ_at_once() -> None:
    producer, consumer = rank_of(FOUR_HEADS, 2, 4), replace(rank_of(FOUR_HEADS, 1, 2), block_size=16, num_blocks=8)
    with connected_pair("loopback", producer_layout=producer, consumer_layout=consumer) as pair:
        hand_over_in_chunks(pair, SMALL_IDS, LARGE_IDS)
        source, target = tokens(pair.producer.cache, SMALL_IDS), tokens(pair.consumer.cache, LARGE_IDS)
        assert torch.equal(target[:NUM_TOKENS, :1], source[:NUM_TOKENS])
        assert not target[:, 1:].any()


def test_a_broken_link_leaves_whole_pieces_only() -> None:
    with connected_pair("loopback", producer_layout=SMALL, consumer_layout=LARGE) as pair:
        pair.begin("a", LARGE_IDS, NUM_TOKENS)
        pair.producer.compute("a", SMALL_IDS, 0, 9)
        # Chunks are ordered: when this one's transfer is over, the first one is in.
        pair.hand_over("b", (9, 10), (7,), 8)
        pair.producer.abort_links()
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
        pair.producer.wait_failed_sending("a")
