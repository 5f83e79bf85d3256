"""Links of the NCCL transport over a fake NCCL: what arrives, in which order, and how links come up."""

from __future__ import annotations

import base64
import ctypes
import gc
import threading
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.errors import LinkLost
from kv_transfer.transports.nccl import NcclLink, Rendezvous
from tests.kv_transfer.transports.fake_nccl import GARBAGE, VERSION, FakeEvent, FakeNcclError, FakeNetwork
from tests.kv_transfer.transports.nccl_ends import (
    TIMEOUT_S,
    End,
    linked,
    make_end,
    open_link,
    random_blocks,
    start,
)

BLOCK_SIZE_BYTES = 16


@pytest.fixture
def ends(network: FakeNetwork) -> tuple[End, End]:
    return make_end(network), make_end(network)


def test_scattered_blocks_arrive_bit_for_bit_and_nothing_else_is_written(ends: tuple[End, End]) -> None:
    source, target = random_blocks(16, BLOCK_SIZE_BYTES), torch.zeros(16, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    source_ids, target_ids = [7, 8, 9, 3, 0, 15], [1, 12, 13, 14, 15, 5]
    with linked(*ends) as (producer, consumer):
        sending = start(lambda: producer.send([source[i] for i in source_ids], TIMEOUT_S))
        consumer.receive([target[i] for i in target_ids], TIMEOUT_S)
        sending.result(TIMEOUT_S)
    expected = torch.zeros_like(target)
    expected[target_ids] = source[source_ids]
    assert torch.equal(target, expected)


def test_a_chunk_is_one_group_of_merged_messages(ends: tuple[End, End]) -> None:
    source, target = random_blocks(8, BLOCK_SIZE_BYTES), torch.zeros(8, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    with linked(*ends) as (producer, consumer):
        for end in ends:
            end.fake.num_groups, end.fake.sizes = 0, []
        sending = start(lambda: producer.send(source[:6].unbind(), TIMEOUT_S))
        consumer.receive([target[i] for i in (6, 1, 2, 3, 4, 0)], TIMEOUT_S)
        sending.result(TIMEOUT_S)
    for end in ends:
        assert (end.fake.num_groups, end.fake.sizes) == (1, [64, 32])
    assert torch.equal(target[[6, 1, 2, 3, 4, 0]], source[:6])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=8), min_size=1, max_size=3))
def test_whatever_the_blocks_chunks_arrive_in_order(chunks: list[list[int]]) -> None:
    network = FakeNetwork()
    ends = make_end(network), make_end(network)
    sources = [[random_blocks(1, size, seed)[0] for seed, size in enumerate(sizes)] for sizes in chunks]
    targets = [[torch.zeros_like(block) for block in chunk] for chunk in sources]
    with linked(*ends) as (producer, consumer):
        sending = start(partial(send_all, producer, sources))
        for chunk in targets:
            consumer.receive(chunk, TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert all(torch.equal(a, b) for xs, ys in zip(sources, targets, strict=True) for a, b in zip(xs, ys, strict=True))
    assert network.violations == []
    network.close()


def send_all(link: NcclLink, chunks: Sequence[Sequence[Tensor]]) -> None:
    for chunk in chunks:
        link.send(chunk, TIMEOUT_S)


def test_a_send_waits_for_the_compute_stream_on_the_device_only(ends: tuple[End, End]) -> None:
    source, target = random_blocks(2, BLOCK_SIZE_BYTES), torch.zeros(2, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    computed = FakeEvent()
    launched = threading.Event()
    with linked(*ends) as (producer, consumer):
        ends[0].fake.on_launch = launched.set
        sending = start(lambda: producer.send(source.unbind(), TIMEOUT_S, computed))
        receiving = start(lambda: consumer.receive(target.unbind(), TIMEOUT_S))
        assert launched.wait(TIMEOUT_S), "the host launches without waiting"
        source.fill_(7)
        assert not target.any()
        computed.set()
        sending.result(TIMEOUT_S)
        receiving.result(TIMEOUT_S)
    assert target.eq(7).all()


def test_a_receive_writes_nothing_before_its_blocks_are_vacated(ends: tuple[End, End]) -> None:
    source, target = random_blocks(2, BLOCK_SIZE_BYTES), torch.zeros(2, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    vacated = FakeEvent()
    launched = threading.Event()
    with linked(*ends) as (producer, consumer):
        ends[1].fake.on_launch = launched.set
        receiving = start(lambda: consumer.receive([target[1], target[0]], TIMEOUT_S, vacated))
        sending = start(lambda: producer.send(source.unbind(), TIMEOUT_S))
        assert launched.wait(TIMEOUT_S)
        assert [call.done() for call in (sending, receiving)] == [False, False]
        target.fill_(9)
        vacated.set()
        receiving.result(TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert torch.equal(target, source[[1, 0]])


def test_links_of_one_device_launch_one_after_the_other(network: FakeNetwork) -> None:
    producer = make_end(network)
    consumers = [make_end(network) for _ in range(3)]
    links = [open_link(producer, consumer) for consumer in consumers]
    turns: list[bool] = []
    producer.fake.on_launch = lambda: turns.append(producer.transport._launch_lock.locked())
    targets = [torch.zeros(2, BLOCK_SIZE_BYTES, dtype=torch.uint8) for _ in links]
    source = random_blocks(2, BLOCK_SIZE_BYTES)
    calls = [start(partial(near.send, source.unbind(), TIMEOUT_S)) for near, _ in links]
    calls += [
        start(partial(far.receive, target.unbind(), TIMEOUT_S)) for (_, far), target in zip(links, targets, strict=True)
    ]
    for call in calls:
        call.result(TIMEOUT_S)
    assert all(torch.equal(target, source) for target in targets)
    assert turns == [True] * 3
    for near, far in links:
        near.close()
        far.close()


def test_a_stalled_peer_does_not_hold_up_another_link(network: FakeNetwork) -> None:
    producer, stalled, alive = (make_end(network) for _ in range(3))
    source, target = random_blocks(2, BLOCK_SIZE_BYTES), torch.zeros(2, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    with linked(producer, stalled) as (to_stalled, _), linked(producer, alive) as (to_alive, far):
        waiting = start(lambda: to_stalled.send(source.unbind(), TIMEOUT_S))
        sending = start(lambda: to_alive.send(source.unbind(), TIMEOUT_S))
        far.receive(target.unbind(), TIMEOUT_S)
        sending.result(TIMEOUT_S)
        assert not waiting.done()
        to_stalled.abort()
        with pytest.raises(LinkLost):
            waiting.result(TIMEOUT_S)
    assert torch.equal(target, source)


def test_the_rendezvous_is_text_and_comes_back_whole(ends: tuple[End, End]) -> None:
    text = ends[0].transport.listen().rendezvous
    parsed = Rendezvous.parse(text)
    assert parsed.format() == text
    assert text.split("/", 2)[:2] == [str(VERSION), "64"]
    assert len(base64.b64decode(text.split("/", 2)[2])) == 128


@pytest.mark.parametrize("text", ["", "127.0.0.1:99", "22809/64/!", "22809/0/AAAA", "22809/99999999999/AAAA"])
def test_what_is_no_rendezvous_is_refused(ends: tuple[End, End], text: str) -> None:
    with pytest.raises(LinkLost):
        ends[1].transport.connect(text, TIMEOUT_S)
    assert ends[1].fake.comms == []


def test_ends_with_different_nccls_do_not_try(ends: tuple[End, End]) -> None:
    rendezvous = Rendezvous(22707, 64, bytes(128)).format()
    with pytest.raises(LinkLost, match="the consumer has NCCL 22809, the producer 22707"):
        ends[1].transport.connect(rendezvous, TIMEOUT_S)
    assert ends[1].fake.comms == []


def test_the_consumer_cuts_messages_as_its_producer_does(network: FakeNetwork) -> None:
    producer, consumer = make_end(network, message_size_bytes=64), make_end(network, message_size_bytes=16)
    source, target = random_blocks(5, BLOCK_SIZE_BYTES), torch.zeros(5, BLOCK_SIZE_BYTES, dtype=torch.uint8)
    with linked(producer, consumer) as (near, far):
        sending = start(lambda: near.send(source.unbind(), TIMEOUT_S))
        far.receive(target.unbind(), TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert torch.equal(target, source)


def test_a_link_on_which_bytes_come_damaged_does_not_open(network: FakeNetwork) -> None:
    ends = make_end(network), make_end(network)
    network.tells_peer = False  # else an end may hear of the other's abort before it has looked at what it received
    network.damage = lambda address: ctypes.memset(address, GARBAGE, 1)
    with pytest.raises(LinkLost, match="damaged"):
        open_link(*ends)


def test_nccls_own_refusal_is_a_lost_link(ends: tuple[End, End]) -> None:
    def refuse(num_ranks: int, unique_id: bytes, rank: int) -> None:
        raise FakeNcclError(5)

    object.__setattr__(ends[0].fake.nccl, "init_rank", refuse)
    with pytest.raises(LinkLost, match="NCCL failed: NCCL status 5"):
        ends[0].transport.listen().accept(TIMEOUT_S)


def test_a_closed_link_leaves_no_communicator_stream_or_thread(ends: tuple[End, End]) -> None:
    with linked(*ends):
        pass
    for thread in threading.enumerate():
        if thread.name.startswith("nccl-"):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    gc.collect()
    for end in ends:
        assert [comm.is_aborted for comm in end.fake.comms] == [True]
        assert [stream.is_closed for stream in end.fake.device.streams.values()] == [True]
        assert end.wedged == []
