"""Links over TCP and over a shared pool, end against end, and what a broken or late end can do.

Tests of kv_transfer/transports/base.py, kv_transfer/transports/byte_stream.py,
kv_transfer/transports/shared_memory.py, kv_transfer/transports/tcp_link.py.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.shared_memory import SharedMemoryLink
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.transports.tcp_link import TcpLink
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.transports.ipv6 import has_ipv6
from tests.kv_transfer.transports.tcp_setup import tcp_transport

pytestmark = pytest.mark.usefixtures("patient_handshakes")

TIMEOUT_S = 60.0
SHORT_S = 0.05


def make_pool(*, is_shared: bool) -> Tensor:
    pool = allocate_shared_pool(LAYOUT) if is_shared else torch.zeros(LAYOUT.shape)
    return pool.copy_(torch.randn(LAYOUT.shape, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(params=[False, True], ids=["tcp", "shared memory"])
def pool(request: pytest.FixtureRequest) -> Tensor:
    return make_pool(is_shared=request.param)


@contextmanager
def joined(pool: Tensor, host: str = "127.0.0.1") -> Iterator[tuple[DataLink, DataLink]]:
    """The producer's and the consumer's end."""
    pending = tcp_transport(host, pool).listen()
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        consumer = tcp_transport(host, torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S)
        producer = accepting.result(TIMEOUT_S)
    try:
        yield producer, consumer
    finally:
        producer.close()
        consumer.close()


def move(producer: DataLink, sources: list[Tensor], consumer: DataLink, targets: list[Tensor]) -> None:
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(producer.send, sources, TIMEOUT_S)
        consumer.receive(targets, TIMEOUT_S)
        sending.result(TIMEOUT_S)


def test_one_host_shares_memory_if_the_pool_is_in_a_file_and_speaks_tcp_if_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kv_transfer.transports.tcp")
    with joined(make_pool(is_shared=True)) as ends:
        assert all(isinstance(end, SharedMemoryLink) for end in ends)
    with joined(make_pool(is_shared=False)) as ends:
        assert all(isinstance(end, TcpLink) for end in ends)
    assert [vars(record)["path"] for record in caplog.records] == ["shared memory"] * 2 + ["tcp"] * 2


def test_a_link_comes_up_over_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1")
    pool = make_pool(is_shared=False)
    target = torch.zeros_like(pool[3])
    with joined(pool, "::1") as (producer, consumer):
        move(producer, [pool[3]], consumer, [target])
    assert torch.equal(target, pool[3])


def test_a_consumer_that_cannot_map_the_pool_falls_back_to_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> np.ndarray:
        raise PermissionError

    monkeypatch.setattr("kv_transfer.transports.tcp.map_pool", fail)
    pool = make_pool(is_shared=True)
    with joined(pool) as (producer, consumer):
        assert isinstance(producer, TcpLink)
        assert isinstance(consumer, TcpLink)
        target = torch.zeros_like(pool[3])
        move(producer, [pool[3]], consumer, [target])
        assert torch.equal(target, pool[3])


def test_blocks_head_ranges_and_gathered_buffers_arrive_bit_for_bit(pool: Tensor) -> None:
    with joined(pool) as (producer, consumer):
        for sources in ([pool[7], pool[2]], [pool[5, 1:]], [pool[[4, 9]]]):
            targets = [torch.zeros_like(source) for source in sources]
            move(producer, sources, consumer, targets)
            for source, target in zip(sources, targets, strict=True):
                assert torch.equal(source, target)


def test_a_stranger_does_not_keep_the_consumer_out() -> None:
    pool = make_pool(is_shared=False)
    pending = tcp_transport("127.0.0.1", pool).listen()
    host, port, _ = pending.rendezvous.split("|")
    with ThreadPoolExecutor(1) as thread, socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"x" * 16)
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        consumer = tcp_transport(host, torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S)
        producer = accepting.result(TIMEOUT_S)
    move(producer, [pool[1]], consumer, [torch.zeros_like(pool[1])])
    producer.close()
    consumer.close()


def test_an_end_that_hangs_up_is_noticed_at_once(pool: Tensor) -> None:
    for breaks in (0, 1):
        with joined(pool) as ends:
            ends[breaks].close()
            with pytest.raises(LinkLost):
                ends[1].receive([torch.zeros_like(pool[0])], TIMEOUT_S)


def test_a_silent_producer_costs_the_deadline(pool: Tensor) -> None:
    with joined(pool) as (_, consumer), pytest.raises(ChunkTimeout):
        consumer.receive([torch.zeros_like(pool[0])], SHORT_S)


def test_a_silent_consumer_costs_the_deadline() -> None:
    pool = make_pool(is_shared=True)
    with joined(pool) as (producer, _), pytest.raises(ChunkTimeout):
        producer.send([pool[0]], SHORT_S)


def test_an_abort_wakes_an_end_that_waits(pool: Tensor) -> None:
    with joined(pool) as (_, consumer), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(consumer.receive, [torch.zeros_like(pool[0])], TIMEOUT_S)
        consumer.abort()
        assert isinstance(waiting.exception(TIMEOUT_S), LinkLost)


def test_ends_that_disagree_on_a_chunks_size_lose_the_link(pool: Tensor) -> None:
    with joined(pool) as (producer, consumer), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(producer.send, [pool[0, :1]], TIMEOUT_S)
        with pytest.raises(LinkLost):
            consumer.receive([torch.zeros_like(pool[0])], TIMEOUT_S)
        consumer.close()
        sending.exception(TIMEOUT_S)


def test_a_copy_that_ends_after_its_producer_gave_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGSTOP, say, the consumer reads blocks that have been reused meanwhile, and must not report them."""
    pool, is_let_go = make_pool(is_shared=True), threading.Event()

    def copy_late(target: np.ndarray, source: np.ndarray) -> None:
        assert is_let_go.wait(TIMEOUT_S)
        target[:] = source

    with joined(pool) as (producer, consumer), ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr("kv_transfer.transports.shared_memory.np.copyto", copy_late)
        receiving = thread.submit(consumer.receive, [torch.zeros_like(pool[0])], TIMEOUT_S)
        with pytest.raises(ChunkTimeout):
            producer.send([pool[0]], SHORT_S)
        producer.close()
        pool[0] = -1.0
        is_let_go.set()
        assert isinstance(receiving.exception(TIMEOUT_S), LinkLost)


def test_nobody_joins_and_the_producer_gives_up() -> None:
    with pytest.raises(LinkLost, match="did not join"):
        tcp_transport("127.0.0.1", make_pool(is_shared=True)).listen().accept(SHORT_S)
