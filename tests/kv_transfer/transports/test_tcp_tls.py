"""Links over TCP with TLS: everything that holds for those without, and nobody from outside of the cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.link_opening import Opening
from kv_transfer.transports.tcp_link import TcpLink
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.tls import InternalTls
from tests.kv_transfer.transports.tcp_setup import tcp_transport
from tests.kv_transfer.transports.test_tcp import SHORT_S, TIMEOUT_S, make_pool, move

POOL = make_pool(is_shared=False)


@pytest.fixture(scope="module")
def tls() -> InternalTls:
    return InternalTls(draw_tls_material())


@contextmanager
def joined(tls: InternalTls) -> Iterator[tuple[DataLink, DataLink]]:
    """The producer's and the consumer's end."""
    pending = tcp_transport("127.0.0.1", POOL, tls=tls).listen()
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        consumer = tcp_transport("127.0.0.1", torch.zeros(1), tls=tls).connect(pending.rendezvous, TIMEOUT_S)
        producer = accepting.result(TIMEOUT_S)
    try:
        yield producer, consumer
    finally:
        producer.close()
        consumer.close()


def test_blocks_arrive_bit_for_bit_however_large_they_are(tls: InternalTls) -> None:
    large = torch.randn(3 * 2**20, generator=torch.Generator().manual_seed(1))
    with joined(tls) as (producer, consumer):
        assert isinstance(producer, TcpLink)
        assert producer.path == "tcp, TLS"
        for sources in ([POOL[7], POOL[2]], [POOL[5, 1:]], [large], [POOL[1]] * 600):
            targets = [torch.zeros_like(source) for source in sources]
            move(producer, sources, consumer, targets)
            for source, target in zip(sources, targets, strict=True):
                assert torch.equal(source, target)
        assert not any(end.is_cut() for end in (producer, consumer))


def test_nothing_of_a_block_is_readable_on_the_way(tls: InternalTls) -> None:
    """By a relay between the two ends, which sees every byte."""
    block = torch.frombuffer(bytearray(b"the secret of a tenant, " * 100), dtype=torch.uint8)
    seen = bytearray()
    pending = tcp_transport("127.0.0.1", POOL, tls=tls).listen()
    host, port, token = pending.rendezvous.split("|")
    with socket.create_server(("127.0.0.1", 0)) as relay, ThreadPoolExecutor(4) as threads:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            while part := source.recv(65536):
                seen.extend(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)

        def run() -> None:
            consumer_side, _ = relay.accept()
            with consumer_side, socket.create_connection((host, int(port))) as producer_side:
                back = threads.submit(pass_on, producer_side, consumer_side)
                pass_on(consumer_side, producer_side)
                back.result(TIMEOUT_S)

        relaying = threads.submit(run)
        accepting = threads.submit(pending.accept, TIMEOUT_S)
        through = "|".join(("127.0.0.1", str(relay.getsockname()[1]), token))
        consumer = tcp_transport("127.0.0.1", torch.zeros(1), tls=tls).connect(through, TIMEOUT_S)
        producer = accepting.result(TIMEOUT_S)
        target = torch.zeros_like(block)
        move(producer, [block], consumer, [target])
        producer.close()
        consumer.close()
        relaying.result(TIMEOUT_S)
    assert torch.equal(target, block)
    assert len(seen) > block.nbytes
    assert b"secret" not in seen
    assert bytes.fromhex(token) not in seen


def test_an_end_that_hangs_up_is_noticed_at_once(tls: InternalTls) -> None:
    for breaks in (0, 1):
        with joined(tls) as ends:
            ends[breaks].close()
            with pytest.raises(LinkLost):
                ends[1].receive([torch.zeros_like(POOL[0])], TIMEOUT_S)


def test_a_silent_producer_costs_the_deadline(tls: InternalTls) -> None:
    with joined(tls) as (_, consumer), pytest.raises(ChunkTimeout):
        consumer.receive([torch.zeros_like(POOL[0])], SHORT_S)


def test_a_consumer_that_reads_nothing_costs_the_deadline(tls: InternalTls) -> None:
    with joined(tls) as (producer, _), pytest.raises(ChunkTimeout):
        producer.send([torch.zeros(16 * 2**20)], 0.3)


def test_an_abort_wakes_both_ends(tls: InternalTls) -> None:
    with joined(tls) as ends, ThreadPoolExecutor(1) as thread:
        for aborted in ends:
            waiting = thread.submit(ends[1].receive, [torch.zeros_like(POOL[0])], TIMEOUT_S)
            aborted.abort()
            assert isinstance(waiting.exception(TIMEOUT_S), LinkLost)
            assert all(end.is_cut() for end in ends)


@pytest.mark.parametrize("stranger", ["another authority's", "plain"])
def test_a_stranger_fails_and_does_not_keep_the_consumer_out(tls: InternalTls, stranger: str) -> None:
    strange = None if stranger == "plain" else InternalTls(draw_tls_material())
    pending = tcp_transport("127.0.0.1", POOL, tls=tls).listen()
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        called = tcp_transport("127.0.0.1", torch.zeros(1), tls=strange)
        try:
            link = called.connect(pending.rendezvous, TIMEOUT_S)
        except LinkLost as error:
            is_plain = stranger == "plain"
            assert is_plain or "its certificate is not of this cluster's authority" in str(error)  # noqa: PT017
        else:
            with link_closing(link), pytest.raises(LinkLost):
                link.receive([torch.zeros_like(POOL[0])], TIMEOUT_S)
        consumer = tcp_transport("127.0.0.1", torch.zeros(1), tls=tls).connect(pending.rendezvous, TIMEOUT_S)
        producer = accepting.result(TIMEOUT_S)
    target = torch.zeros_like(POOL[1])
    move(producer, [POOL[1]], consumer, [target])
    assert torch.equal(target, POOL[1])
    producer.close()
    consumer.close()


@contextmanager
def link_closing(link: DataLink) -> Iterator[None]:
    try:
        yield
    finally:
        link.close()


def test_a_producer_without_tls_is_refused(tls: InternalTls) -> None:
    pending = tcp_transport("127.0.0.1", POOL).listen()
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, 1.0)
        with pytest.raises(LinkLost):
            tcp_transport("127.0.0.1", torch.zeros(1), tls=tls).connect(pending.rendezvous, TIMEOUT_S)
        assert isinstance(accepting.exception(TIMEOUT_S), LinkLost)


def test_a_link_can_be_given_up_while_its_peer_keeps_the_handshake_waiting(tls: InternalTls) -> None:
    opening = Opening()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as thread:
        rendezvous = "|".join((*map(str, silent.getsockname()), "00" * 16))
        transport = tcp_transport("127.0.0.1", torch.zeros(1), tls=tls)
        connecting = thread.submit(transport.connect, rendezvous, 60.0, opening)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1), "TLS's first record"
            opening.give_up()
            assert isinstance(connecting.exception(TIMEOUT_S), LinkLost)
