"""Checksums of chunks: what they cover, whose belongs to which, and what becomes of a load with a flipped bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import xxhash
from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import ChunkSum
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.checksum import ComparedChunks, checksum_of
from kv_transfer.links.send_receive_thread import ChunkJob
from tests.kv_transfer.connected_workers import LAYOUT, Join, Pair, connected_pair
from tests.kv_transfer.faulty_transport import Faults

CHECKED = KVTransferConfig(checksum=True, max_chunk_bytes=1)
"""One block a chunk."""
SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14
JOINS: tuple[Join, ...] = ("loopback", "tcp", "shared memory")
LARGE = replace(LAYOUT, block_size=16, num_blocks=8)


# -- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_is_of_all_bytes_in_order(dtype: torch.dtype) -> None:
    blocks = [torch.arange(24).view(2, 3, 4).to(dtype), torch.ones(5, dtype=dtype)]
    data = b"".join(bytes(block.view(-1).view(torch.uint8).tolist()) for block in blocks)
    assert checksum_of(blocks) == xxhash.xxh3_64_intdigest(data)
    assert checksum_of(blocks[::-1]) != checksum_of(blocks)


def job(transfer_id: str, index: int, checksum: int) -> ChunkJob:
    return ChunkJob(transfer_id, [], attempt=3, index=index, checksum=checksum)


def test_chunks_and_words_are_compared_in_order_whichever_comes_first() -> None:
    compared = ComparedChunks()
    jobs = job("a", 0, 5), job("b", 0, 6)
    compared.add_job(jobs[0])
    assert compared.take() is None
    compared.add_word(ChunkSum("a", 3, 0, 5))
    assert compared.take() == (jobs[0], True)
    compared.add_word(ChunkSum("b", 3, 0, 7))
    assert compared.take() is None
    compared.add_job(jobs[1])
    assert compared.take() == (jobs[1], False)
    assert compared.take() is None


@pytest.mark.parametrize("word", [ChunkSum("b", 3, 0, 5), ChunkSum("a", 2, 0, 5), ChunkSum("a", 3, 1, 5)])
def test_a_word_about_another_chunk_breaks_the_protocol(word: ChunkSum) -> None:
    compared = ComparedChunks()
    compared.add_job(job("a", 0, 5))
    compared.add_word(word)
    with pytest.raises(
        ProtocolViolation, match=f"a checksum of chunk {word.index} of {word.transfer_id}, but the next"
    ):
        compared.take()


def test_what_no_word_came_about_is_left_over() -> None:
    compared = ComparedChunks()
    jobs = [job("a", index, 5) for index in range(3)]
    for one in jobs:
        compared.add_job(one)
    compared.add_word(ChunkSum("a", 3, 0, 5))
    assert compared.take() == (jobs[0], True)
    assert compared.take_unsure() == jobs[1:]
    assert compared.take_unsure() == []


# -- the load --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Flip:
    """The first bit of the n-th chunk that arrives, from 0."""

    at_chunk: int

    def strike(self, blocks: Sequence[Tensor]) -> None:
        self.at_chunk -= 1
        if self.at_chunk == -1:
            blocks[0].view(-1).view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize("join", JOINS)
def test_intact_chunks_are_loaded(join: Join) -> None:
    with connected_pair(join, CHECKED) as pair:
        received = pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        assert (received.outcome, received.first_token_id) == (LoadOutcome.LOADED, 7)
        assert torch.equal(pair.consumer.cache, pair.expected_cache(SOURCE, TARGET))
        assert pair.consumer.stats().num_corrupt_chunks == 0


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("corrupt", range(4))
def test_a_flipped_bit_fails_the_load_and_leaves_the_chunks_before_it(
    join: Join, corrupt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(after_receive=Flip(corrupt).strike).install(monkeypatch)
    with connected_pair(join, CHECKED) as pair:
        received = pair.hand_over("a", SOURCE, TARGET, NUM_TOKENS)
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 4 * corrupt)
        assert received.reason == f"t-a: chunk {corrupt} was corrupted on its way"
        valid = pair.consumer.cache[list(TARGET[:corrupt])]
        assert torch.equal(valid, pair.producer.cache[list(SOURCE[:corrupt])])
        assert not pair.consumer.cache[TARGET[corrupt]].any(), "what came instead may be no number"
        check_that_nothing_is_left(pair)


def test_a_flipped_bit_in_pieces_of_a_larger_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Faults(after_receive=Flip(1).strike).install(monkeypatch)
    with connected_pair("loopback", CHECKED, consumer_layout=LARGE) as pair:
        received = pair.hand_over("a", SOURCE, (5,), NUM_TOKENS)
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 4)
        assert torch.equal(pair.consumer.cache[5, ..., :4, :], pair.producer.cache[SOURCE[0]])
        assert not pair.consumer.cache[5, ..., 4:8, :].any()


@pytest.mark.parametrize("ends", [(LAYOUT, LARGE), (LARGE, LAYOUT)], ids=["scattered", "gathered"])
def test_intact_pieces_are_loaded(ends: tuple[KVCacheLayout, KVCacheLayout]) -> None:
    ids = [SOURCE if layout is LAYOUT else (5,) for layout in ends]
    with connected_pair("loopback", CHECKED, producer_layout=ends[0], consumer_layout=ends[1]) as pair:
        assert pair.hand_over("a", ids[0], ids[1], NUM_TOKENS).outcome is LoadOutcome.LOADED


def test_a_cancelled_load_with_a_flipped_bit_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    Faults(after_receive=Flip(1).strike).install(monkeypatch)
    with connected_pair("loopback", CHECKED) as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.consumer.cancel("a")
        received = pair.consumer.wait_received("a")
        assert received.outcome is LoadOutcome.CANCELLED
        assert received.num_valid_tokens <= 4
        pair.producer.wait_failed_sending("a")
        pair.producer.finish("a", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("a")


def check_that_nothing_is_left(pair: Pair) -> None:
    """The link lives on, and no transfer does."""
    assert pair.hand_over("b", SOURCE, range(12, 16), NUM_TOKENS).outcome is LoadOutcome.LOADED
    consumer, producer = pair.consumer.stats(), pair.producer.stats()
    assert (consumer.num_corrupt_chunks, consumer.num_transfers_failed, consumer.num_transfers_completed) == (1, 1, 1)
    assert consumer.failures == {"corrupt": 1}
    assert (consumer.num_active_transfers, producer.num_active_transfers) == (0, 0)
    assert (consumer.num_links_lost, producer.num_links_lost) == (0, 0)
